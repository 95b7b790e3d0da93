"""What comes over from DeepSpeed and Accelerate: their configs and DeepSpeed's checkpoints.

This room reads their files and says what each key and tensor becomes here.
It imports neither PyTorch nor DeepSpeed, and trains nothing.
To add a key, add a row to `keys.KEYS` or `accelerate_keys.KEYS`; docs/migrate.md shows the tables, and a test compares them.
"""
