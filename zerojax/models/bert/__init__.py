"""BERT and its relatives with a head that classifies texts.

`model` holds the network, `modern` that of ModernBERT. `family` holds their presets, the names of Hugging Face's tensors and the `Family`s.
There is no mesh, no sharding and no rematerialisation here.
To add a preset, add a line to the table in `family`.
"""
