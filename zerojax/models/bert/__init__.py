"""BERT, RoBERTa and DistilBERT with a head that classifies texts.

`model` holds the network. `family` holds its presets, the names of Hugging Face's tensors and the `Family`.
There is no mesh, no sharding and no rematerialisation here.
To add a preset, add a line to the table in `family`.
"""
