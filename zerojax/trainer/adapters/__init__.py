"""Adapters in a run: `config.lora`.

`start` chooses them, and makes and restores a state whose other weights are frozen. `outputs` exports them.
How adapters compute is no part of this, see `zerojax.lora`.
To add a setting, add a field to `config.LoraSettings` and read it in `start`.
"""
