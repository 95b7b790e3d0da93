"""ZeRO stage 1: the optimizer state is sharded over the devices.

    python -m zerojax.train --config configs/zero1.py

Devices: any number that divides 32; without an accelerator 8 CPU devices are emulated. Result: a byte-level model of
0.9M parameters on the Python standard library's source. Training loss falls from 5.8 to about 2.1 in 150 steps, and evaluation
loss is about 2.5, within minutes on two cores. The run prints a table of the bytes on each device.
"""

from zerojax.configs import base


def get_config():
    c = base.get_config()
    c.zero.stage = 1
    c.log_every = 1
    return c
