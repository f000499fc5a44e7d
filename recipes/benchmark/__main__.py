"""Run `python recipes/benchmark NAME ...`; settings.py says how."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # Python put this folder there; the package `benchmark` is next to it
from benchmark.settings import Request, read_arguments

if __name__ == "__main__":  # before torch is imported: a wrong config is an error in half a second
    REQUEST = read_arguments(sys.argv[1:])

import importlib
import json
import signal

from benchmark.tools import environment, print_tables
from torchllm.tools.launch.rank_start import start_runtime


def main(request: Request, package: str = "benchmark") -> None:
    """Run one benchmark; rank 0 prints."""
    name, config = request.name, request.config
    runtime = start_runtime(config.run, [config])
    signal.signal(signal.SIGINT, signal.default_int_handler)  # there is nothing to save
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    facts = environment(config, runtime)
    module = importlib.import_module(f"{package}.{name}")  # only this one: each needs other packages
    tables = getattr(module, name)(config, runtime)
    if runtime.is_main and config.benchmark.json:
        print(json.dumps({"benchmark": name, "environment": facts, **tables}))
    elif runtime.is_main:
        print_tables(name, facts, tables)
    runtime.close()


if __name__ == "__main__":
    main(REQUEST)
