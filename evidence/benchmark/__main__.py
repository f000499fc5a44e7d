"""Measure torchllm beside torchtitan, and a save beside its training; as `python recipes/benchmark NAME` does others.

    python evidence/benchmark NAME [CONFIG.toml] [--section.key=value ...]
    python -P -m torchllm.tools.launch.launch --nproc-per-node=2 evidence/benchmark NAME ...      on several ranks

NAME is one of

    checkpoint   a synchronous save, and the time that an asynchronous one takes from training; it needs a large
                 model and short steps: --model.hidden=1024 --model.ffn=4096 --training.global_batch_size=2
    titan        a training step against torchtitan's of the same model; needs a GPU and torchtitan 0.3.0
"""

import sys
from pathlib import Path

if __name__ == "__main__":  # before torch is imported: a wrong config is an error in half a second
    ROOT = Path(__file__).parents[2]
    sys.path[0] = str(ROOT)
    sys.path.insert(0, str(ROOT / "recipes"))
    from benchmark.settings import read_arguments

    from evidence.benchmark import NAMES

    REQUEST = read_arguments(sys.argv[1:], NAMES, __doc__)
    from benchmark.__main__ import main

    main(REQUEST, "evidence.benchmark")
