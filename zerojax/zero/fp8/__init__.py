"""fp8 in a train step: which modules compute in it, and the magnitudes that they remember.

The arithmetic is in `ops.fp8`, and weights sent in 8 bits are in `wires.fp8`. This folder knows modules, and no config.
A recipe is a key of `ops.fp8.RECIPES`.
"""
