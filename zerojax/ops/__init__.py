"""Functions of arrays that models share: losses, table look-ups, attention.

No module, no mesh and no state.
An operation is a file here, with its equation in the docstring and a test against the plain form.
"""
