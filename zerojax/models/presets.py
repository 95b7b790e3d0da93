"""Model shapes by name. This module is a table; vocab_size 0 takes the tokenizer's."""

import functools

from zerojax.models.llama import LlamaConfig

# Their base of 500,000 for rotary positions serves up to 32,768 of them (arXiv:2407.21783, section 3.2).
_llama3 = functools.partial(LlamaConfig, 128256, rope_theta=500000.0, max_seq_len=32768)

PRESETS: dict[str, LlamaConfig] = {
    "test": LlamaConfig(0, 2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128, max_seq_len=512),
    "tiny": LlamaConfig(0, 4, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, max_seq_len=2048),
    "llama3_1b": _llama3(16, embed_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192),
    "llama3_8b": _llama3(32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336),
    "llama3_70b": _llama3(80, embed_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp_dim=28672),
}
