"""Llama and its relatives: decoders that differ in fields of `LlamaConfig` (Gemma, Qwen, Mistral, Phi-3, gpt-oss, DeepSeek, GPT-2).

`model` holds the network. `published` holds presets, `family` the names of Hugging Face's tensors and the `Family`.
There is no mesh, no sharding and no rematerialisation here.
A relative is a row of `rows`, presets in `published`, and what `family` reads of its config.json.
"""
