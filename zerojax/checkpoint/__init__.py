"""Train states on disk.

Here live the checkpointer, the files of a step and the logical form in which a state is stored, the same for every stage and precision.
No config and no loop.
A new kind of leaf gets its stored form in `logical`.
"""
