"""trackio: `metrics.trackio = "PROJECT"`, extra `trackio`. Its files are in TRACKIO_DIR; `trackio show` reads them.

With TRACKIO_SPACE_ID the run goes to a Space of Hugging Face; `trackio sync` sends one that was written without.
"""

from collections.abc import Mapping

import trackio

from torchllm.tools.watch.trackers import ExperimentTracker, RunFacts


def open_trackio(facts: RunFacts) -> ExperimentTracker:
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

    def log(step: int, values: Mapping[str, float]) -> None:
        run.log(dict(values), step=step)

    return ExperimentTracker(log, run.finish)
