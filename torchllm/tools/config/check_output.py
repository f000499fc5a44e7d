"""The output of --check: settings for run_train.sh, and the checked configs for its ranks."""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from torchllm.config.environment import HANDED
from torchllm.config.schema import Config, Parallel, Training, gradient_accumulation
from torchllm.tools.config.environment import Ranks, print_error_lines, refuse, same_words

SCHEDULED_RESTARTS = 3
"""default of run.restarts under a scheduler: restarts without progress"""


def describe_batch(training: Training, parallel: Parallel) -> str:
    """Describe how ranks share the sequences of a step; the degrees of `parallel` are resolved."""
    accumulated = gradient_accumulation(training, parallel.data_ranks)
    return (
        f"global batch {training.global_batch_size} sequences = {parallel.data_ranks} data ranks x "
        f"{training.micro_batch_size} micro batch x {accumulated} accumulated"
    )


def print_check(config: Config, ranks: Ranks) -> None:
    """Print the settings for run_train.sh on stdout, and the batch for the user on stderr."""
    parallel = config.parallel
    per_node, uneven = divmod(parallel.ranks, ranks.nodes)
    if uneven:
        refuse([f"environment: NNODES: {ranks.nodes} nodes cannot share {parallel.ranks} ranks evenly"])
    print(f"NPROC={per_node}")
    print(f"RUN_FOLDER={config.run.folder}")
    print(f"SAMPLE={int(config.generate.after_training)}")
    print(f"START_TIMEOUT={config.run.start_timeout:g}")
    if ranks.spare:
        print(f"TRAINING_NODES={ranks.nodes}")
        print(f"WAIT_REASON={ranks.spare}")
    restarts = default_restarts() if config.run.restarts < 0 else config.run.restarts
    if restarts:
        print(f"RESTARTS={restarts}")
    if config.run.stopped_exit_status:
        print(f"STOPPED_EXIT_STATUS={config.run.stopped_exit_status}")
    if config.run.on_event:
        print(f"ON_EVENT={config.run.on_event}")
    if config.run.dry_run:
        print("DRY_RUN=1")
    print_error_lines([describe_batch(config.training, parallel)])


def default_restarts() -> int:
    """Return the value of run.restarts = -1: 3 under Slurm or with the variables for Kubernetes, else 0."""
    is_scheduled = "SLURM_STEP_ID" in os.environ or "PET_NNODES" in os.environ
    return SCHEDULED_RESTARTS if is_scheduled else 0


def hand_over(configs: Sequence[Config], origins: Mapping[str, str], words: Sequence[str]) -> None:
    """Write checked configs for the ranks, if run_train.sh waits for them (`torchllm/tools/front/start.py` reads them).

    origins: where each key was written. words: the command line.
    """
    if file := os.environ.get(HANDED):
        handed = {"words": same_words(words), "configs": [asdict(config) for config in configs], "origins": origins}
        Path(file).write_text(json.dumps(handed))
