"""trackio: `metrics.trackio = "PROJECT"`, extra `trackio`. Its files are in TRACKIO_DIR; `trackio show` reads them.

With TRACKIO_SPACE_ID the run goes to a Space of Hugging Face; `trackio sync` sends one that was written without.
"""

from collections.abc import Mapping
from typing import Any

import trackio

from torchllm.tools.watch.trackers import RunFacts


class TrackioTracker:
    """A run of trackio."""

    def __init__(self, run: Any) -> None:
        self.run = run

    def log(self, step: int, values: Mapping[str, float]) -> None:
        """Send the values of a step."""
        self.run.log(dict(values), step=step)

    def close(self) -> None:
        """Wait until all is written."""
        self.run.finish()


def open_trackio(facts: RunFacts) -> TrackioTracker:
    """Return the run with the id of `facts`, new or continued: trackio knows runs by their names."""
    run = trackio.init(
        facts.project,
        name=f"{facts.name}-{facts.run_id}",
        resume="allow",
        config=dict(facts.config),
        embed=False,
        auto_log_cpu=False,
        auto_log_gpu=False,
    )
    return TrackioTracker(run)
