"""An encoder-decoder in the form of T5 v1.1, trained to fill in missing spans (span corruption), stage 3.

    python -m zerojax.train --config configs/t5_tiny.py

Devices: any number that divides 32; without an accelerator 8 CPU devices are emulated. Result: TODO
"""

from configs import base


def get_config():
    c = base.get_config()
    c.model.preset = "t5_tiny"
    c.steps = 300
    c.sample.prompt = "def ___(self):\n    return self.___\n"  # ___ stands for a missing span
    c.sample.length = 48
    return c
