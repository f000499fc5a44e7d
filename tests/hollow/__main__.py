"""Run a command on the hollow GPU.

    python -m tests.hollow ./run_train.sh train_configs/debug.toml
    HOLLOW_DEVICES=2 NPROC=2 python -m tests.hollow ./run_train.sh train_configs/debug.toml --parallel.tp=2

HOLLOW_ARCHITECTURE (sm_80, sm_89, sm_90, sm_100, sm_120), HOLLOW_DEVICES and HOLLOW_GIB describe the machine.
"""

import os
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.hollow.bed import H100, Machine, environment, missing


def machine_of_settings() -> Machine:
    """Return the machine that the environment describes."""
    return Machine(
        os.environ.get("HOLLOW_ARCHITECTURE", H100.architecture),
        int(os.environ.get("HOLLOW_DEVICES", H100.devices)),
        float(os.environ.get("HOLLOW_GIB", H100.gib)),
    )


def main(command: list[str]) -> int:
    """Run the command; return its exit status."""
    if not command:
        print(__doc__)
        return 2
    if reason := missing():
        print(f"error: {sys.executable}: {reason}", file=sys.stderr)
        return 2
    with tempfile.TemporaryDirectory() as messages:
        return subprocess.run(command, env=environment(machine_of_settings(), Path(messages))).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
