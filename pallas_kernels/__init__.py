"""Kernels for optimizer updates, experts and decoding. This package holds each of them behind one function, with a plain-jnp twin.

    update.update_leaves   AdamW, Adam with coupled decay and Lion over many leaves, in place: unscale, clip factor, update, weight decay,
                           skip on overflow, a 16-bit copy; moments in float32, bfloat16 or 8-bit blocks; stochastic rounding
    blockwise              the 8-bit code of moments
    rounding               random bits from a counter, and stochastic rounding to bfloat16
    rules                  the arithmetic of an update, shared by kernel and twin
    narrow.multiply        a matmul of few rows with a weight in 16, 8 or 4 bits, which is read once, as it is stored
    wire.pack, unpack_sum  blocks of 8 or 4 bits for collectives, each value read once
    grouped.grouped_matmul     the matmuls of experts: groups of rows by a matrix each, and both gradients
    grouped_mxfp4.rows     the same by frozen matrices in MXFP4, read as they are stored
    one_token              a decoder's layer for one new token of one text, in five kernels
    chunk_scan.scan        the gated delta rule and Mamba-2's scan over chunks of tokens, and their gradients; the twin is in `zerojax`
    cached_attention.attend    attention of one token a row to a cache, of which only slots with text are read

Other functions take `implementation`: "pallas" (GPUs, through Triton), "interpret" (the same kernel anywhere, slowly, for tests) or "jnp".
Kernels know no meshes: callers run them on each device's shard, inside `jax.shard_map`.
"""
