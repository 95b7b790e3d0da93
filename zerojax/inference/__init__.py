"""Text out of a trained model.

Here lives sampling from weights that stay sharded.
No training and no file format.
A way to pick the next token goes into `generate`.
"""
