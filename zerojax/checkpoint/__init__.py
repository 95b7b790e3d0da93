"""Train states on disk.

This room holds the checkpointer, the files of a step and the logical form of a stored state. That form is the same for every stage and
precision.
It holds no config and no loop.
To store a new kind of leaf, add its stored form to `logical`.
"""
