"""What a loss function written for one device takes and returns when its batch is sharded over many.

This package shards the batch, gives each device its own random keys, and makes equal on all devices what the loss returns.
It knows nothing of weights, stages or collectives of gradients.
"""
