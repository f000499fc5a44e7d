"""The header of a written run."""

from dataclasses import replace
from pathlib import Path

from tests.tools.planner.search.test_numbers import JOB
from torchllm.config import Training
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.layouts import Layout
from torchllm.tools.planner.search.search import Ranked
from torchllm.tools.planner.search.written import header


def test_a_written_run_names_both_figures_of_its_memory() -> None:
    planned = replace(JOB, gpus=8, training=Training(sequence_length=2048, global_batch_size=64))
    layout = Layout(1, 1, planned.gpus, 1, 1)
    prediction = predict(planned.case(layout))
    memory = prediction.memory
    lines = header(Path("run.toml"), planned, Ranked(layout, prediction))
    assert all(line.startswith("#") for line in lines)
    assert f", {memory.total / 2**30:.1f} GiB per GPU;" in lines[-3]
    assert lines[-2] == f"# {memory.live / 2**30:.1f} of them are tensors, which a dry run counts."
    assert memory.live < memory.total
