"""Write what `torchllm plan explain` says of the runs in train_configs/ into their headers.

    python docs/planned.py

Below their lines and those of the dry run it is written by hand why a run does not take the first pick.
tests/config/test_train_configs.py compares.
"""

import math
import re
import textwrap
from dataclasses import replace
from pathlib import Path

from torchllm.tools.config.degrees import resolve_degrees
from torchllm.tools.planner.cluster import read_cluster
from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.advice import advise
from torchllm.tools.planner.search.layouts import Job, layout_of
from torchllm.tools.planner.search.question import read_model
from torchllm.tools.planner.search.search import search
from torchllm.tools.planner.validity import judge

FOLDER = Path(__file__).resolve().parents[1] / "train_configs"
PLANNED = re.compile(r"^# Planned, not measured: (?:.+\n)+?(?=# Dry run: )", re.M)
HARDWARE = re.compile(r"^# Hardware: ([\d,]+)(?: nodes of ([\d,]+))?", re.M)
WIDTH = 128


def planned(file: Path) -> str:
    """Return the lines of a run's header about its layout, and about the one that the planner would take."""
    config = read_model(str(file)).config
    gpus = gpus_of(file)
    parallel, problems = resolve_degrees(config.parallel, gpus, "")
    hardware = read_cluster(config.cluster.name, [])
    assert not problems
    assert hardware is not None
    job = Job(config.model, config.training, hardware, gpus, trained=config.trained, optimizer=config.optimizer)
    layout = layout_of(replace(config, parallel=parallel))
    prediction = predict(job.case(layout))
    first = advise(job, search(job)).first
    low, high = judge(job.case(layout), prediction).seconds
    text = (
        f"Planned, not measured: {figures(job, prediction)}. A step takes {low:.3g} to {high:.3g} s in 9 of 10 cases. "
    )
    if layout.text() == first.layout.text():
        text += "It is the first pick of `torchllm plan explain`."
    else:
        gain = 100 * (prediction.step / first.prediction.step - 1)
        compared = f"{gain:.1f} % faster" if gain > 0 else f"{-gain:.1f} % slower"
        text += f"The first pick of `torchllm plan explain` ({first.layout.text()}) is {compared}."
    return textwrap.fill(text, WIDTH, initial_indent="# ", subsequent_indent="# ", break_on_hyphens=False) + "\n"


def gpus_of(file: Path) -> int:
    """Return the number of GPUs that a run's header names."""
    hardware = HARDWARE.search(file.read_text())
    assert hardware is not None
    numbers = [int(number.replace(",", "")) for number in hardware.groups("1")]
    return math.prod(numbers)


def figures(job: Job, prediction: Prediction) -> str:
    """Return speed, memory and the time of the whole training."""
    tokens = job.training.global_batch_size * job.training.sequence_length
    hours = prediction.step * job.training.steps / 3600
    time = f"{hours:.0f} hours" if hours < 100 else f"{hours / 24:.0f} days"
    each = " per GPU" if job.gpus > 1 else ""
    speed = f"{float(f'{tokens / prediction.step:.3g}'):,.0f} tokens/s, MFU {100 * prediction.mfu:.1f} %"
    return f"{speed}, {prediction.memory.total / 2**30:.1f} GiB{each}; {time}"


def main() -> None:
    """Write all headers again."""
    for file in sorted(FOLDER.glob("*.toml")):
        text = file.read_text()
        if found := PLANNED.search(text):
            file.write_text(text.replace(found[0], planned(file)))


if __name__ == "__main__":
    main()
