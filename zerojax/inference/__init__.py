"""Text out of a trained model, and what it says of texts.

This room holds generation from weights that stay sharded, with a cache of keys and values.
It holds no training and no file format.
`generate` answers a batch of one shape, `engine` requests that come and go, `texts` gives scores and vectors.
To pick the next token in another way, extend `sampling`.
"""
