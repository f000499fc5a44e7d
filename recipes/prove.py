"""Prove that a config, or a fork, trains the same model under every layout: on this machine's CPU, in a minute.

    python recipes/prove.py CONFIG.toml [--section.key=value ...]
    RECIPE=recipes/mine.py python recipes/prove.py CONFIG.toml       the model, the loss and the sections of a fork
    python recipes/prove.py CONFIG.toml --dtype=bfloat16             against one process's own rounding

A small copy of the config (fewer and narrower layers, a small vocabulary, random documents; all features kept) is
trained under layouts that cover every pair of settings. Loss, every gradient and the new weights of each must equal
those on one process. A key given on the command line does not change. Exit status 1: a layout is wrong.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torchllm.config.errors import UserError
from torchllm.tools.front.resolve import load_sizes
from torchllm.tools.proof.pool import Pool
from torchllm.tools.proof.prove import ProofOptions, ProvenLayout, culprits, prove
from torchllm.tools.proof.recipe import import_recipe
from torchllm.tools.resources import resource

LINE = "{:>9} {:>6}  {:<42} {}"


def main(arguments: Sequence[str], pool: Pool) -> int:
    """Prove one config on the ranks of a pool; returns the exit status."""
    options, rest = prove_parser().parse_known_args(arguments)
    recipe = Path(os.environ.get("RECIPE") or resource("recipes/pretrain.py")).resolve()
    config = load_sizes(rest, import_recipe(recipe).schema)
    kept = {word[2:].partition("=")[0] for word in rest if word.startswith("--")}
    asked = ProofOptions(options.ranks, options.dtype, options.layouts, options.seed)
    print(LINE.format("error", "s", "worst parameter", "layout"), flush=True)
    results = []
    for result in prove(recipe, config, asked, pool, kept):
        results.append(result)
        print_result(result)
    print_summary(results, asked)
    return 0 if all(result.is_right for result in results) else 1


def prove_parser() -> argparse.ArgumentParser:
    """Return the parser of the options that are not keys of the config."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--ranks", type=int, default=4, help="ranks of a layout, at most (default: 4)")
    parser.add_argument("--dtype", choices=("float32", "bfloat16"), default="float32")
    parser.add_argument("--layouts", type=int, help="layouts to draw (default: until every pair of settings occurred)")
    parser.add_argument("--seed", type=int, default=0, help="of the draw, the weights and the data")
    return parser


def print_result(result: ProvenLayout) -> None:
    """Print the line of a layout, and its differences."""
    parameter, error, findings, rounding, _ = result.agreement
    shown = f"{error:.1e}" if error else "same bits"
    in_float64 = f" (in float64; {rounding:.1e} in float32, by rounding)" if rounding else ""
    print(LINE.format(shown, f"{result.seconds:.1f}", parameter, result.name + in_float64))
    if findings:
        print(f"    wrong: {findings[0]}")
    sys.stdout.flush()


def print_summary(results: Sequence[ProvenLayout], options: ProofOptions) -> None:
    """Print the number of right layouts, and advice if one is wrong."""
    wrong = [result for result in results if not result.is_right]
    what = f"{len(results)} layouts of up to {options.ranks} ranks in {options.dtype}"
    if not wrong:
        worst = max(result.agreement.error for result in results)
        print(f"{what}: all train the model that one process trains, worst gradient error {worst:.1e}")
        return
    print(f"{what}: {len(wrong)} wrong")
    if any(result.is_alone for result in wrong):
        print("wrong without any parallelism: one process does not agree with itself, so that no layout can")
    for technique in culprits(wrong):
        print(f"{technique.name}: {technique.hint}")


if __name__ == "__main__":
    os.environ.setdefault("TQDM_DISABLE", "1")  # inherited by ranks: no progress bars
    POOL = Pool()
    try:
        STATUS = main(sys.argv[1:], POOL)
    except UserError as error:
        print(error, file=sys.stderr)
        STATUS = 2
    finally:
        POOL.close()
    sys.exit(STATUS)
