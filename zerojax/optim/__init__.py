"""Optimizers: optax transformations by name, and optimizers whose update is one pass over memory.

This room holds schedules, fused and 8-bit optimizers, Muon with its owners of matrices, master weights, and the `jax.shard_map` around
kernels of `pallas_kernels`.
It has no stage, no train state and no step.
An optimizer is a class of `registry.OPTIMIZERS`; a schedule is a line of `schedules.SCHEDULES`.
"""
