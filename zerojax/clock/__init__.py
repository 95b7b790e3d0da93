"""The clock: how long a compiled program will take, without running it.

`kernels` lists the work of each instruction, `rates` holds how fast a kind of GPU does it, and `walk` lays the program on the GPU's
streams. This room reads programs through `hlo`. It knows no ZeRO, no config and no target's memory; `plan` joins its answer with the rest.
A kind of GPU is a file in `tables/`: each figure with its source. To read a new kind of instruction, extend `kernels.of`.
`scripts/foretell.py` compares it with all measured steps (docs/benchmarks/clock.md).
"""
