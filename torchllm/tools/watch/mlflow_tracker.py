"""MLflow: `metrics.mlflow = "EXPERIMENT"`, extra `mlflow`. MLFLOW_TRACKING_URI names the server.

Without that variable the run is in RUN_FOLDER/trackers/mlflow.db: `mlflow ui --backend-store-uri sqlite:///FILE`.
"""

import os
import time
from collections.abc import Mapping
from functools import partial

from mlflow.entities import Metric, Param
from mlflow.tracking import MlflowClient

from torchllm.tools.config.by_key import values_by_key
from torchllm.tools.watch.trackers import ExperimentTracker, RunFacts

RUN_ID = "torchllm.run_id"
"""tag that identifies a resumed run"""
LONGEST_PARAMETER = 500
"""characters of a parameter's value that every server of MLflow takes"""
PARAMETERS_AT_ONCE = 100
"""that a server takes in a request"""


def open_mlflow(facts: RunFacts) -> ExperimentTracker:
    """Return the run with the id of `facts`, new or continued."""
    client = MlflowClient(os.environ.get("MLFLOW_TRACKING_URI") or f"sqlite:///{facts.folder}/mlflow.db")
    experiment = client.get_experiment_by_name(facts.project)
    experiment_id = client.create_experiment(facts.project) if experiment is None else experiment.experiment_id
    runs = client.search_runs([experiment_id], f"tags.`{RUN_ID}` = '{facts.run_id}'")
    if runs:
        run_id = runs[0].info.run_id
        client.update_run(run_id, status="RUNNING")
    else:
        run_id = client.create_run(experiment_id, run_name=facts.name, tags={RUN_ID: facts.run_id}).info.run_id
        parameters = [Param(key, str(value)[:LONGEST_PARAMETER]) for key, value in values_by_key(facts.config).items()]
        for first in range(0, len(parameters), PARAMETERS_AT_ONCE):
            client.log_batch(run_id, params=parameters[first : first + PARAMETERS_AT_ONCE])

    def log(step: int, values: Mapping[str, float]) -> None:
        moment = int(time.time() * 1000)
        client.log_batch(run_id, [Metric(name, value, moment, step) for name, value in values.items()])

    return ExperimentTracker(log, partial(client.set_terminated, run_id))
