"""Writes translated settings as a config of ours. This module makes the text of a Python file that starts from zerojax.configs.base."""

import json
from collections.abc import Mapping
from typing import Any

# The order of settings in a config; those of one group stay together.
GROUPS = (
    "seed init_from steps global_batch_size micro_batch_size grad_accum seq_len precision reduce_dtype accum_dtype log_every "
    "emulate_devices mesh zero offload model lora optimizer loss_scale data evaluate checkpoint export"
).split()
WHY: Mapping[str, str] = {"emulate_devices": "as many as the file speaks of, where there is no accelerator"}


def text(
    settings: Mapping[str, Any], sources: Mapping[str, tuple[str, ...]], *, origin: str, path: str, maker: str = ""
) -> str:
    """Returns the text of a config.

    Args:
      settings: {place: value}.
      sources: {place: the foreign keys that decided it}.
      origin: the name of the file that was translated.
      path: where the config will be, for its command.
      maker: begins the config's docstring, before `origin`; "" for that of `zerojax migrate`.
    """

    def order(place: str) -> tuple[int, int]:
        group = place.split(".")[0]
        return (GROUPS.index(group) if group in GROUPS else len(GROUPS), list(settings).index(place))

    rows = []
    for place in sorted(settings, key=order):
        value = settings[place]
        literal = json.dumps(value) if isinstance(value, str) else repr(value)
        why = ", ".join(map(_plain, sources.get(place, ()))) or WHY.get(place, "implied")
        rows.append(f"    c.{place} = {literal}  # {why}")
    devices = settings.get("emulate_devices", 0)
    needed = f"{devices} device{'s' if devices > 1 else ''}" if devices else "any number that divides the batch"
    told = f"Translated from {_plain(origin)} by `zerojax migrate`, which reports what every key of that file became."
    first = f"{maker} {_plain(origin)}." if maker else told
    lines = [
        f'"""{first}',
        "",
        f"    python -m zerojax.train --config {_plain(path)}",
        "",
        f"Devices: {needed}. What is not set below, such as the data, is that of zerojax.configs.base.",
        '"""',
        "",
        "from zerojax.configs import base",
        "",
        "",
        "def get_config():",
        "    c = base.get_config()",
        *rows,
        "    return c",
    ]
    return "\n".join(lines) + "\n"


def _plain(name: str) -> str:
    """Returns a name on one line, without what would end a docstring."""
    return " ".join(name.split()).replace("\\", "/").replace('"', "'")
