"""Checks that both clients are what a run takes them for. This module tests zerojax.trainer.clients.run_info."""

import inspect

from zerojax.trainer.clients import mlflow_client, run_info, wandb_client


def test_each_client_takes_what_the_protocol_says():
    for kind in (wandb_client._Wandb, mlflow_client._Mlflow):
        for name in ("write", "close"):
            ours = inspect.signature(getattr(kind, name)).parameters
            assert list(ours) == list(inspect.signature(getattr(run_info.Client, name)).parameters)
