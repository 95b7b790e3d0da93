"""Text out of a trained model.

This room holds generation from weights that stay sharded, with a cache of keys and values.
It holds no training and no file format.
To pick the next token in another way, extend `sampling`.
"""
