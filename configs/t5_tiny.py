"""A T5 v1.1 encoder-decoder, trained to fill in missing spans (span corruption), stage 3.

    python -m zerojax.train --config configs/t5_tiny.py

Devices: any number that divides 32; without an accelerator 8 CPU devices are emulated. Result: a byte-level model of 0.87M parameters on
the Python standard library's source. Training loss falls from 4.2 at step 10 to about 2.4 in 300 steps, evaluation loss is about 2.6, and
the run prints a prompt with its gaps filled, within minutes on two cores. In so few steps the model learns which bytes are common, and
little about the text around a gap.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.model.preset = "t5_tiny"
    c.steps = 300
    c.sample.prompt = "def ___(self):\n    return self.___\n"  # ___ marks a missing span
    c.sample.length = 48
    return c
