"""Llama and its relatives: decoders that differ in parts of `LlamaConfig` (Gemma, Qwen, Mistral, Phi-3, gpt-oss, DeepSeek, GPT-2).

`config` holds the parts of a config, `attention` and `mlp` the branches of a layer, `model` the network. `family`
holds the names of Hugging Face's tensors and the `Family`.
There is no mesh, no sharding and no rematerialisation here.
A relative is a combination of parts of `config`: a row of `model_types`, presets in `published`, and what `config_file` reads of its
config.json. A new idea is a part, with a module of its own as `mla` has.
"""
