"""Gradients: the forward and the backward pass of a loss over all devices, of one or several micro-batches.

This room holds the two forms (`explicit`, with collectives of our own, and `by_compiler`), sums of several passes, and a pass that goes
forward only. It knows no optimizer, and not how a step is cut into programs.
A new form is a module with a `value_and_grad` like theirs.
"""
