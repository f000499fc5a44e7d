"""Takes steps of one rank of torchtitan on the hollow GPU, and reports them as `one_rank` does. For torchtitan 0.3.0.

    python -m tests.hollow python -m tests.hollow.titan_rank train_configs/llama3_8b_8gpu.toml --recompute.mode=full

The step is that of `evidence/benchmark titan`: torchtitan's own trainer, with the model and the layout of a config.
"""

import json
import os
import sys
from dataclasses import asdict

from evidence.benchmark.titan import torchtitan_step
from tests.hollow.one_rank import join_absent_ranks, prepare, report
from torchllm.tools.config.load import load_config


def main(arguments: list[str]) -> None:
    """Print the report of the last step."""
    config = load_config([*arguments, "--run.dry_run=true"])  # the number of ranks is the product of the degrees
    prepare()
    join_absent_ranks(0, config.parallel.ranks)
    print(json.dumps(asdict(report(torchtitan_step(config, 0, cuda_graphs=False)))), flush=True)
    os._exit(0)  # without the destructors of process groups whose peers do not exist


if __name__ == "__main__":
    main(sys.argv[1:])
