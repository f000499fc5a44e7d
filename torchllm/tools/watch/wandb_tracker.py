"""Weights & Biases: `metrics.wandb = "PROJECT"`, extra `wandb`. The API key comes from `wandb login` or WANDB_API_KEY.

Without a key or a network the run is written to RUN_FOLDER/trackers/wandb; `wandb sync` sends it later.
"""

import shlex
import ssl
from typing import Any
from urllib.error import HTTPError, URLError
from urllib.request import urlopen

import wandb

from torchllm.tools.watch.trackers import ExperimentTracker, RunFacts

CONNECT_SECONDS = 15.0
"""that wandb may take to reach its server"""
ANSWER_SECONDS = 5.0
"""that the server may take to answer at all; wandb alone takes 26 s to give up, and a run waits 20 s for its helper"""


def open_wandb(facts: RunFacts) -> ExperimentTracker:
    """Return the run that has the id of `facts`, new or continued; offline where the server cannot be reached."""
    arguments: dict[str, Any] = {
        "project": facts.project,
        "name": facts.name,
        "id": facts.run_id,
        "resume": "allow",
        "config": dict(facts.config),
        "allow_val_change": True,  # of the config of a resumed run
        "dir": facts.folder,
        "settings": wandb.Settings(init_timeout=CONNECT_SECONDS, console="off", x_disable_stats=True),
    }
    settings = wandb.setup().settings
    reason = why_out_of_reach(settings.base_url) if settings.mode == "online" else ""
    if not reason:
        try:
            return _tracker(wandb.init(**arguments))
        except wandb.errors.Error as error:
            reason = str(error)
            wandb.teardown()  # its service still has a run with this id
    folder = shlex.quote(f"{facts.folder}/wandb")
    print(f"wandb: {reason}; offline: `wandb sync {folder}/offline-run-*` sends it later", flush=True)
    return _tracker(wandb.init(**arguments, mode="offline"))


def _tracker(run: Any) -> ExperimentTracker:
    """Return an open run as `send_records.py` uses it."""
    # wandb's own step may not go back, and a step's profile comes after the next step's loss.
    run.define_metric("step")
    run.define_metric("*", step_metric="step")
    return ExperimentTracker(lambda step, values: run.log({"step": step, **values}), run.finish)


def why_out_of_reach(url: str) -> str:
    """Return why a server gives no answer, through the proxies of the environment; "" if it gives any."""
    try:
        urlopen(url, timeout=ANSWER_SECONDS).close()
    except HTTPError:
        return ""  # an answer
    except URLError as error:
        if isinstance(error.reason, ssl.SSLError):
            return ""  # wandb has its own certificates
        return f"{url} is out of reach ({error.reason})"
    except OSError as error:
        return f"{url} is out of reach ({error})"
    return ""
