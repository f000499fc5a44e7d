"""The pool of ranks of the tests: see `torchllm/tools/proof/pool.py`. `run(function, world_size, *arguments)`."""

import atexit

from torchllm.tools.proof.pool import Pool, WorkerFailed

__all__ = ["POOL", "WorkerFailed", "run"]

POOL = Pool(preload=["tests.parity"])
atexit.register(POOL.close)  # a script that uses the pool ends, although its ranks wait for more calls
run = POOL.run
