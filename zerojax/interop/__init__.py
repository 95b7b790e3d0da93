"""Other projects' file formats.

This room holds readers and writers of Hugging Face folders, and of what comes over from DeepSpeed and Accelerate.
It holds no training.
To add a format, add a file here. The names and layouts of a family's tensors belong to the family.
"""
