"""State in host memory or on a disk: which leaves, in which pieces, where, and how it begins there.

This room holds the settings, the choice of leaves and pieces, groups of them, the budget of host memory, and the files of a disk. It runs
no step: `offload` does. Only this room names the memory kind.
Another place to offload to is a value of `settings.KINDS`; another part of the state is a row of `settings.PARTS`.
"""
