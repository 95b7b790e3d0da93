"""A tiny mixture whose experts live on four of eight devices each, learning the Python standard library as bytes: expert parallelism.

    python -m zerojax.train --config configs/experts_tiny.py

Devices: 4, 8 or 16; without an accelerator 8 CPU devices are emulated. Result: the loss falls as without the axis
(--config.mesh.expert=1 --config.experts.parts=1), from 5.8, a uniform guess over 320 ids.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.model.preset = "moe_test"
    c.mesh.expert = 4
    c.experts.parts = 2
    return c
