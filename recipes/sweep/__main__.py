"""Run `python recipes/sweep SWEEP.toml ...`; sweep.py says how."""

import signal
import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # Python put this folder there; the package `sweep` is next to it
from sweep.sweep import main

if __name__ == "__main__":
    signal.signal(signal.SIGPIPE, signal.SIG_DFL)  # `| head` ends --help and --dry-run quietly
    main(sys.argv[1:])
