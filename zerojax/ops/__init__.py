"""Functions of arrays that models share: losses, table look-ups, attention (also over tokens that devices share), experts.

This room holds no module and no state. A function may ask the mesh that it is traced under which axes it is to run over.
To add an operation, add a file with its equation in the docstring and a test against the plain form.
"""
