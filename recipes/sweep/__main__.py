"""python recipes/sweep SWEEP.toml ...: see sweep.py."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # Python put this folder there; the package `sweep` is found beside it
from sweep.sweep import main

if __name__ == "__main__":
    main(sys.argv[1:])
