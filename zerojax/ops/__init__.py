"""Functions of arrays that models share: losses, table look-ups, attention.

This room holds no module, no mesh and no state.
To add an operation, add a file with its equation in the docstring and a test against the plain form.
"""
