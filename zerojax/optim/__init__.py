"""Optimizers: optax transformations by name, and those whose whole step is one pass over memory.

Here live schedules, fused and 8-bit forms, master weights, and how a kernel of `pallas_kernels` runs on each device's shard.
No stage, no train state and no step.
An optimizer is a line of `registry.OPTIMIZERS`; a schedule a line of `registry.SCHEDULES`.
"""
