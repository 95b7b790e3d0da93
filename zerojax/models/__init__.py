"""Model families.

This room holds networks in plain Flax and, for each, a `Family` that the trainer, the plan and the export use.
It holds no mesh, no sharding and no rematerialisation.
To add a family, add a folder and a line to `families`. To add a preset, add a line to the family's own table.
"""
