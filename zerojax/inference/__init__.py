"""Text out of a trained model.

This room holds sampling from weights that stay sharded.
It holds no training and no file format.
To pick the next token in another way, extend `generate`.
"""
