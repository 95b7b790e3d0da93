"""Checks of what a user passes to a train step.

`arguments` holds those of the settings, the weights, the batch and the state. They run when a step is built or traced, and for
the state at each call. There is no sharding here. A new check goes beside those of its argument.
"""
