"""Run `python recipes/ladder LADDER.toml ...`; ladder.py says how."""

import sys
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # Python put this folder there; the package `ladder` is next to it
from ladder.ladder import main

if __name__ == "__main__":
    main(sys.argv[1:])
