"""Every setting at its default. `zerojax train --help` lists them with unit and effect. The other configs override some of them.

    python -m zerojax.train --config configs/base.py

Devices: any number that divides 32; without an accelerator 8 CPU devices are emulated. Result: as configs/zero3.py.
"""

from ml_collections import config_dict

from zerojax.trainer import settings


def get_config():
    return config_dict.ConfigDict(settings.defaults())
