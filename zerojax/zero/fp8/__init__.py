"""fp8 in a train step: which modules compute in it, and weights gathered in 8 bits.

The arithmetic is in `ops.fp8`. This folder knows modules and shardings, and no config.
A recipe is a value of `ops.fp8.RECIPES`.
"""
