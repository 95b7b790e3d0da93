"""Blocks: the calls to a model's modules that gather their own weights, and what is added to them while a loss is traced.

This room holds the settings of blocks, their interception in Linen and NNX, what a backward pass keeps, the order of collectives beside
arithmetic, and the hooks of tensor parallelism. It knows no batch specs, no update and no stage; `where_used` is its public call.
Another framework's modules are another module beside `nnx_blocks`; another thing that a step adds to modules is a hook.
"""
