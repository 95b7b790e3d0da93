"""Other projects' file formats.

This room holds readers and writers of Hugging Face folders and of PEFT's, and what is published of a run's weights
(`deltas`, and `vllm_server`, which tells a server of them). What comes over from DeepSpeed is in `migration`.
It holds no training.
To add a format, add a file here. The names and layouts of a family's tensors belong to the family.
"""
