"""Model families.

Here live networks as plain Flax and, for each, the one value that the trainer, the plan and the export are handed.
No mesh, no sharding, no rematerialisation.
A family is a folder and a line in the table of families; a preset of a family is a line in its own table.
"""
