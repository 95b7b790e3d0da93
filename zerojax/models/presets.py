"""Model shapes by name. This module is a table; vocab_size 0 takes the tokenizer's."""

from zerojax.models.llama import LlamaConfig

PRESETS: dict[str, LlamaConfig] = {
    "test": LlamaConfig(0, 2, embed_dim=64, num_heads=4, num_kv_heads=2, head_dim=16, mlp_dim=128, max_seq_len=512),
    "tiny": LlamaConfig(0, 4, embed_dim=128, num_heads=4, num_kv_heads=2, head_dim=32, mlp_dim=384, max_seq_len=2048),
    "llama3_1b": LlamaConfig(128256, 16, embed_dim=2048, num_heads=32, num_kv_heads=8, head_dim=64, mlp_dim=8192),
    "llama3_8b": LlamaConfig(128256, 32, embed_dim=4096, num_heads=32, num_kv_heads=8, head_dim=128, mlp_dim=14336),
    "llama3_70b": LlamaConfig(128256, 80, embed_dim=8192, num_heads=64, num_kv_heads=8, head_dim=128, mlp_dim=28672),
}
