"""Every key is read by a training, or by what starts it; or a start says that it does nothing."""

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import fields
from functools import partial
from pathlib import Path
from types import FrameType
from typing import Any

from tests.config.test_applied_keys import KEYS, changed
from tests.recipes.warm import pretrain
from tests.tiny_run import ROOT
from torchllm.config import Config, files, schema
from torchllm.tools.config.checks import problems
from torchllm.tools.config.idle import contradictions, idle_keys, keys_of_other_recipes
from torchllm.tools.proof.layouts import with_settings

COPIES = tuple(str(ROOT / "torchllm" / folder) for folder in ("config", "tools/config", "tools/front"))
"""they copy, check or write whole sections: what they read is not used"""
ELSEWHERE = {
    "run.restarts run.stopped_exit_status run.lower_ranks parallel.layout": "run_train.sh and its check",
    "cluster.name": "the planner and the dry run: it describes the machines",
    "generate.after_training": "run_train.sh",
    "generate.prompt generate.prompts_file generate.samples generate.output generate.tokens generate.temperature "
    "generate.top_k generate.chat generate.system generate.history": "recipes/generate.py, from the run's config.toml",
}
"""keys -> who reads them instead of the ranks"""


@contextmanager
def recorded_reads() -> Iterator[set[str]]:
    """Give the keys ("run.seed") that are read until the end, by others than `COPIES` and the dataclasses."""
    reads: set[str] = set()
    sections = {type(getattr(Config(), section.name)): section.name for section in fields(Config)}

    def look_up(self: Any, name: str) -> Any:
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_code.co_filename == schema.__file__:  # a property of a section
            frame = frame.f_back
        file = "" if frame is None else frame.f_code.co_filename
        is_copied = file.startswith(COPIES) and file != files.__file__  # which finds the cache
        if not is_copied and not file.endswith("dataclasses.py"):
            reads.add(f"{sections.get(type(self))}.{name}")
        return object.__getattribute__(self, name)

    for kind in sections:
        kind.__getattribute__ = look_up  # type: ignore[method-assign, assignment]
    try:
        yield reads
    finally:
        for kind in sections:
            del kind.__getattribute__


def _record(file: Path, recipe: Any, rank: int) -> None:
    recipe.main = partial(_recorded_main, recipe.main, file)


def _recorded_main(main: Any, file: Path, *configs: Config) -> None:
    with recorded_reads() as reads:
        main(*configs)
    file.write_text(json.dumps(sorted(reads)))


def test_a_key_that_a_training_never_reads_is_told(tmp_path: Path) -> None:
    assert pretrain(1, tmp_path / "run", change=partial(_record, tmp_path / "reads.json")) == [""]
    reads = set(json.loads((tmp_path / "reads.json").read_text()))
    assert {"model.hidden", "optimizer.beta2", "training.z_loss"} <= reads
    elsewhere = [key for keys in ELSEWHERE for key in keys.split()]
    assert [key for key in elsewhere if key in reads] == []
    of_raw_text = "data.max_raw_mib"  # read where the text is not tokenized yet
    unread = [key for key in KEYS if key not in (*reads, *elsewhere, of_raw_text)]
    silent = []
    for key in unread:
        config = with_settings(changed(key), {"parallel.dp_shard": 1})
        idle = [*contradictions(config), *idle_keys(config), *keys_of_other_recipes(config, is_finetuning=False)]
        told = [item.key for item in (*idle, *problems(config, None))]
        if key not in told:
            silent.append(key)
    assert silent == []
