"""Sends metrics to MLflow. This module uses the package `mlflow`, whose variables apply (MLFLOW_TRACKING_URI).

Without a tracking server the run goes into a file, DIR/mlflow.db, which `mlflow ui --backend-store-uri sqlite:///DIR/mlflow.db` shows.
"""

import logging
import os
from collections.abc import Mapping
from typing import Any

from zerojax.trainer.clients import run_info

FILE, ARTIFACTS = "mlflow.db", "mlflow-artifacts"
_MOST_PARAMS, _LONGEST = 100, 500  # in a request; characters of a value that older servers take


def open_run(info: run_info.RunInfo) -> run_info.Client:
    """Opens or continues a run. Raises what mlflow raises."""
    import mlflow
    from mlflow import entities

    for name in ("mlflow", "urllib3"):  # which log each table that is made, and each try to connect
        logging.getLogger(name).setLevel(logging.ERROR)
    is_file = not os.environ.get("MLFLOW_TRACKING_URI")
    client = mlflow.MlflowClient(tracking_uri=f"sqlite:///{info.folder / FILE}" if is_file else None)
    run_id = info.run_id
    if run_id:
        try:
            client.update_run(run_id, status="RUNNING")
        except mlflow.MlflowException as error:
            if info.is_chosen or error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run_id = ""
    if not run_id:
        run_id = client.create_run(_experiment(client, info, is_file=is_file), run_name=info.name).info.run_id
        params = [entities.Param(place, str(value)[:_LONGEST]) for place, value in info.settings.items()]
        for first in range(0, len(params), _MOST_PARAMS):
            client.log_batch(run_id, params=params[first : first + _MOST_PARAMS])
    return _Mlflow(client, run_id, entities.Metric)


def _experiment(client: Any, info: run_info.RunInfo, *, is_file: bool) -> str:
    """Returns the id of the project's experiment, which is made if it does not exist."""
    found = client.get_experiment_by_name(info.project)
    if found is not None:
        return found.experiment_id
    where = (info.folder / ARTIFACTS).as_uri() if is_file else None
    return client.create_experiment(info.project, artifact_location=where)


class _Mlflow:
    def __init__(self, client: Any, run_id: str, metric: Any) -> None:
        self._client, self._metric = client, metric
        self.run_id = run_id

    def write(self, step: int, seconds: float, values: Mapping[str, float]) -> None:
        found = [self._metric(name, float(value), int(seconds * 1000), step) for name, value in values.items()]
        self._client.log_batch(self.run_id, metrics=found)

    def close(self, *, is_failed: bool) -> None:
        self._client.set_terminated(self.run_id, status="FAILED" if is_failed else "FINISHED")
