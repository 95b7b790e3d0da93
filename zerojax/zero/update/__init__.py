"""Update: from gradients to a new state, with its norm, its clipping and its loss scale.

This room holds the update of a state, those of optimizers that pass over memory once, 16-bit params, padding, and loss scales. It knows no
loss and no block. Another rule for skipping or scaling a step is a module beside `loss_scale`.
"""
