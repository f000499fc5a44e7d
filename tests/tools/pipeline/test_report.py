"""torchllm report of a pipeline's folder: stages, times, costs, scores and samples."""

import json
from pathlib import Path

import pytest

from torchllm import cli
from torchllm.tools.pipeline.stages import PipelineFile, PipelineStage, Record, write_description, write_record

pytestmark = pytest.mark.quick


def make_folder(folder: Path, dollars: float = 3.0) -> Path:
    names = ("corpus", "pretrain", "evaluate", "export")
    stages = tuple(PipelineStage(name, f"do {name}") for name in names)
    stages += (PipelineStage("chat", "talk", needs_terminal=True),)
    for name in names[:3]:
        (folder / name).mkdir(parents=True)
        write_record(folder, name, Record("key", {}, is_done=name != "evaluate", seconds=90.0, cpu_seconds=1234.0))
    write_description(PipelineFile(str(folder), "mine", 8, dollars, stages))
    records = [{"step": 1, "loss": 5.0, "validation_loss": 4.5}, {"step": 2, "loss": 4.25, "mfu": 0.1}]
    (folder / "pretrain/metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    (folder / "pretrain/evaluations").mkdir()
    tasks = {"results": {"arc": {"alias": "arc", "acc,none": 0.5}}}
    (folder / "pretrain/evaluations/step-00000002.json").write_text(json.dumps(tasks))
    (folder / "evaluate/figures.json").write_text('{"recalled": 3297, "bits_after": 2.05}')
    (folder / "evaluate/conversation.txt").write_text("> a question\nan answer\n")
    return folder


REPORT = """\
# pipeline: 2 of 4 stages are done

| stage | state | time | CPU seconds | cost |
|---|---|--:|--:|--:|
| corpus | done | 1:30 | 1,234 | $0.60 |
| pretrain | done | 1:30 | 1,234 | $0.60 |
| evaluate | interrupted | 1:30 | 1,234 | $0.60 |
| export | to do |  |  |  |
| in all |  | 4:30 | 3,702 | $1.80 |

## Scores

pretrain:

    step 2, loss 4.2500, validation loss 4.5000

pretrain:

    arc: acc,none 0.5000

evaluate:

    recalled 3,297, bits after 2.0500

## Samples

evaluate:

    > a question
    an answer
"""


def test_the_report_of_a_pipeline(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "pipeline")
    cli.main(["report", str(folder)])
    assert (folder / "report.md").read_text() == REPORT
    assert capsys.readouterr().out == f"{REPORT}\nwrote {folder}/report.md\n"


def test_without_a_price_there_is_no_cost(tmp_path: Path) -> None:
    cli.main(["report", str(make_folder(tmp_path / "pipeline", dollars=0.0)), "-o", str(tmp_path / "text.md")])
    assert "| in all |  | 4:30 | 3,702 |\n" in (tmp_path / "text.md").read_text()


def test_a_folder_of_an_earlier_version_has_the_stages_that_were_begun(tmp_path: Path) -> None:
    folder = make_folder(tmp_path / "pipeline")
    (folder / "pipeline.json").unlink()
    cli.main(["report", str(folder)])
    assert (folder / "report.md").read_text().startswith("# pipeline: 2 of 3 stages are done\n")


def test_a_damaged_file_and_a_folder_of_nothing_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_folder(tmp_path / "pipeline")
    (folder / "evaluate/figures.json").write_text("{")
    for path, error in ((folder, "evaluate/figures.json: cannot be read"), (tmp_path, "no run folder")):
        with pytest.raises(SystemExit) as ended:
            cli.main(["report", str(path)])
        assert ended.value.code == 2
        assert error in capsys.readouterr().err
