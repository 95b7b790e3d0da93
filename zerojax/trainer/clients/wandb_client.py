"""Sends metrics to Weights & Biases. This module uses the package `wandb`, whose variables apply (WANDB_MODE, WANDB_ENTITY)."""

import inspect
import os
import secrets
from collections.abc import Mapping
from typing import Any

from zerojax.trainer.clients import run_info

_WITHOUT_KEY = ("offline", "disabled", "dryrun")


def open_run(info: run_info.RunInfo) -> run_info.Client:
    """Opens or continues a run. Raises what wandb raises, and RuntimeError where it would ask for a key on the terminal."""
    import wandb

    if os.environ.get("WANDB_MODE", "online") not in _WITHOUT_KEY and not _has_key(wandb):
        raise RuntimeError("no API key is set: run `wandb login` once, or set WANDB_MODE=offline")
    run = wandb.init(
        project=info.project,
        name=info.name,
        id=info.run_id or secrets.token_hex(4),
        resume="allow",
        dir=str(info.folder),
        config=dict(info.settings),
        settings=wandb.Settings(console="off", silent=True),
    )
    run.define_metric("step")  # the steps after a checkpoint come a second time, where wandb's own step may only rise
    run.define_metric("*", step_metric="step")
    return _Wandb(run)


def _has_key(wandb: Any) -> bool:
    """Returns whether wandb knows an API key. Asks nobody."""
    if "prompt" in inspect.signature(wandb.login).parameters:
        return wandb.login(prompt=False, verify=False)
    return wandb.api.api_key is not None


class _Wandb:
    def __init__(self, run: Any) -> None:
        self._run = run
        self.run_id: str = run.id

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        self._run.log({"step": step, **values})

    def close(self, *, is_failed: bool) -> None:
        self._run.finish(exit_code=int(is_failed))
