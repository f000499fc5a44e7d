"""Prove that a config, or a fork, trains the same model under parallel layouts, on this machine's CPU.

    python recipes/prove.py CONFIG.toml [--section.key=value ...]
    RECIPE=recipes/mine.py python recipes/prove.py CONFIG.toml       the model, the loss and the sections of a fork
    python recipes/prove.py CONFIG.toml --ranks=2 --layouts=0        each technique alone: a minute on two cores
    python recipes/prove.py CONFIG.toml --only='tp=2 pp=2'           one layout, by the name that is printed
    python recipes/prove.py CONFIG.toml --dtype=bfloat16             against one process's own rounding

A small copy of the config (fewer and narrower layers, a small vocabulary, random documents; all features kept) is
trained under each technique alone, and then under layouts that cover every pair of settings: up to 140 of them, each
some seconds. Loss, every gradient and the new weights of each must equal those on one process. A key given on the
command line does not change. Exit status 1: a layout is wrong, or too noisy to compare. What the recipe refuses is not.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchllm.config.errors import UserError
from torchllm.tools.front.resolve import load_sizes
from torchllm.tools.proof.pool import Pool
from torchllm.tools.proof.prove import ProofOptions, prove
from torchllm.tools.proof.recipe import import_recipe
from torchllm.tools.proof.report import HEADER, ProofReport
from torchllm.tools.resources import resource


def main(arguments: Sequence[str], pool: Pool) -> int:
    """Prove one config on the ranks of a pool; returns the exit status."""
    parser = prove_parser()
    options, rest = parser.parse_known_args(arguments)
    if options.ranks < 1 or (options.layouts or 0) < 0:
        parser.error("--ranks must be at least 1, --layouts at least 0")
    recipe = Path(os.environ.get("RECIPE") or resource("recipes/pretrain.py")).resolve()
    config = load_sizes(rest, import_recipe(recipe).schema)
    kept = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    asked = ProofOptions(**vars(options))
    report = ProofReport(asked)
    print(HEADER, flush=True)
    for result in prove(recipe, config, asked, pool, kept):
        print(report.add(result), flush=True)
    print(report.summary())
    return 1 if report.having("wrong", "too noisy to compare") else 0


def prove_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not keys of the config."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a layout, at most (default: 4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    number = parser.add_mutually_exclusive_group()
    number.add_argument(
        "--layouts",
        type=int,
        help="layouts to train, the techniques alone first; 0: these (default: until every pair of settings occurred)",
    )
    number.add_argument("--only", default="", help="one layout, by its name: --only='pp=2 recompute.mode=full'")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, the weights and the data")
    return parser


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")  # inherited by ranks: no progress bars
    POOL = Pool()
    try:
        STATUS = main(sys.argv[1:], POOL)
    except (UserError, OSError) as error:
        print(error, file=sys.stderr)
        STATUS = 2
    finally:
        POOL.close()
    sys.exit(STATUS)
