"""Model families.

This room holds networks in plain Flax and, for each, a `Family` that the trainer, the plan and the export use.
It holds no mesh and no rematerialisation. How a family's weights are sharded over `model` is a table beside it (`parallel`).
A family may compute the token of one row by `pallas_kernels` (`Family.one_row`).
To add a family, add a folder and a line to `families`. To add a preset, add a line to the family's own table.
"""
