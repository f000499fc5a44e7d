"""Judge the planner on published measurements. It needs a checkout, neither torch nor a GPU.

    python -m evidence score [CSV ...]                      errors of predictions
    python -m evidence score CSV --cluster my_cluster.toml  of a sweep, with the constants that were fitted to it
    python -m evidence score --parallel.pp=1 --max parallel.tp=4     of rows with a key set, and another bounded
    python -m evidence leave-out fold|framework [CSV ...]   errors on models, or frameworks, that were not fitted to
    python -m evidence intervals [CSV ...]                  how many steps lie in their 90 % intervals
    python -m evidence picks [CSV ...]                      the picked layout against the fastest
    python -m evidence fit FOLDER ...                       the constants that all frameworks share, and their speeds
    python -m evidence residuals FOLDER ... -o FOLDER       errors by class, the basis of the planner's intervals
    python -m evidence pack CSV -o FOLDER                   rows of a sweep of yours, ready for a pull request
    python -m evidence figures results.csv -o FOLDER        a sweep of yours as bars by setting, and predicted times
    python -m evidence hagemann FOLDER -o CSV               sheets of Hagemann et al. 2023, downloaded, as a table

Without CSV files the measurements of evidence/data are taken; evidence/data/SOURCES.md says where they are from.
"""

import argparse
import sys

from evidence.coverage import score_intervals
from evidence.cross_validation import cross_validate
from evidence.figures import write_figures
from evidence.folds import fitted_constants
from evidence.hagemann import convert_hagemann
from evidence.pack import pack_rows, published_measurements
from evidence.picks import score_picks
from evidence.score import score_files
from evidence.write_residuals import write_residuals
from torchllm.config.errors import UserError
from torchllm.tools.planner.search.question import Restrictions

SCORES = {
    "intervals": score_intervals,
    "picks": score_picks,
}
"""commands that take files of measurements alone"""
WRITERS = {"residuals": write_residuals, "pack": pack_rows, "figures": write_figures, "hagemann": convert_hagemann}
"""commands that write `--output`"""


def parser() -> argparse.ArgumentParser:
    top = argparse.ArgumentParser(
        prog="python -m evidence", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = top.add_subparsers(required=True, dest="command")
    for name in ("score", *SCORES, "leave-out"):
        command = commands.add_parser(name)
        if name == "score":
            command.add_argument("--cluster", default="", help="cluster of the measurements (default: each row's own)")
            command.add_argument("--max", action="append", default=[], dest="most", metavar="KEY=NUMBER")
        if name == "leave-out":
            command.add_argument("unit", choices=("fold", "framework"))
        command.add_argument("sources", metavar="CSV", nargs="*")
        command.add_argument("--json", action="store_true", help="print JSON; errors are fractions")
    commands.add_parser("fit").add_argument("folders", metavar="FOLDER", nargs="+")
    for name in WRITERS:
        command = commands.add_parser(name)
        command.add_argument("source", metavar="FOLDER or CSV", nargs="+" if name == "residuals" else None)
        command.add_argument("-o", "--output", required=True, metavar="PATH")
    return top


def main(arguments: list[str]) -> str:
    """Return the output of a command. Raises UserError, OSError or ValueError for wrong input."""
    top = parser()
    options, others = top.parse_known_args(arguments)
    if others and options.command != "score":
        top.error(f"unrecognized arguments: {' '.join(others)}")
    if options.command == "fit":
        return fitted_constants(options.folders)
    if options.command in WRITERS:
        return WRITERS[options.command](options.source, options.output)
    sources = options.sources or published_measurements()
    if options.command == "score":
        restrictions = Restrictions.parse(others, options.most)
        return score_files(sources, options.json, options.cluster, restrictions)
    if options.command == "leave-out":
        return cross_validate(sources, options.unit, options.json)
    return SCORES[options.command](sources, options.json)


if __name__ == "__main__":
    try:
        print(main(sys.argv[1:]))
    except (UserError, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        raise SystemExit(2) from None
