"""Other projects' file formats.

Here live readers and writers of Hugging Face folders.
No training.
A format is a file here; the names and layouts of a family's tensors belong to the family.
"""
