"""What a run knows of requests to stop it. `torchllm/tools/launch/stop_requests.py` receives them."""

import json
from pathlib import Path

STOPPED = "stopped.json"
"""marker in the run folder: the run was asked to stop, has ended for that reason, and can be resumed"""
STOP = "stop"
"""file in the run folder that asks the run to stop; created by run_train.sh or by the user"""


class StopSource:
    """What may ask this rank to stop. By default nothing does."""

    def requested(self) -> bool:
        """Return whether this rank was asked to stop."""
        return False

    def begin_votes(self) -> None:
        """End this rank's start-up: called before its first vote on stopping."""

    def begin_training(self) -> None:
        """Mark every rank as started: called when the first vote is complete."""


def write_marker(folder: Path, step: int | None) -> None:
    """Write the marker that tells run_train.sh: this run has ended early on purpose.

    step: of its last checkpoint; None if it was still starting and had nothing to save.
    """
    (folder / STOPPED).write_text(json.dumps({"step": step}) + "\n")
