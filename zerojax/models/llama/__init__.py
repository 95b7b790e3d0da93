"""Decoders in Llama's form.

`model` holds the network; `family` its presets, the names of Hugging Face's tensors and the family's value.
No mesh, no sharding, no rematerialisation.
A preset is a line in the table of `family`.
"""
