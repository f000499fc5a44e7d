"""The page about runs: well-formed, without references to anything outside, with the figures of the run folders."""

import json
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import pytest

from tests.tiny_run import ROOT
from torchllm.config.schema import Config, Data, MixtureStage, Source
from torchllm.config.write import dump_toml
from torchllm.tools.watch.notices import note_sources
from torchllm.tools.watch.report import LATEST, main, read_run_folder

FIXTURE = ROOT / "tests/fixtures/commit_8ca45ed/llama"
NAME = "<run> & co"


def _write_run(folder: Path, records: list[dict[str, object]], name: str = NAME) -> Path:
    run = folder / name
    (run / "checkpoints/step-00000002").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records))
    (run / "config.toml").write_text(dump_toml(Config()))
    launch = {"started": 0.0, "first": 0, "seen": 100.0, "step": 2, "lost": {"start-up": 20.0, "data": 5.0}, "last": 2}
    (run / "goodput.json").write_text(json.dumps([launch]))
    return run


def _record(step: int, **values: object) -> dict[str, object]:
    return {"step": step, "loss": 5.0 / step, "grad_norm": 1.0, "tokens_per_second": 1234.5, "mfu": None} | values


def _page(arguments: list[str], output: Path) -> str:
    main([*arguments, "-o", str(output)])
    return output.read_text()


def test_the_page_is_well_formed_and_refers_to_nothing(tmp_path: Path) -> None:
    text = _page([str(_write_run(tmp_path, [_record(1), _record(2, validation_loss=2.25)]))], tmp_path / "page.html")
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))  # every element is closed, every text escaped
    without_names = text.replace('xmlns="http://www.w3.org/1999/xhtml"', "").replace(
        'xmlns="http://www.w3.org/2000/svg"', ""
    )
    assert not re.search(r"(src|href)\s*=|url\(|@import|https?:", without_names)


def test_a_run_may_be_named_by_its_config(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [_record(1)])
    main([str(run / "config.toml")])
    assert (run / "report.html").is_file()


def test_every_figure_is_one_of_the_run_folder(tmp_path: Path) -> None:
    records = [_record(1), _record(2, validation_loss=2.25, skipped_steps=3)]
    text = _page([str(_write_run(tmp_path, records))], tmp_path / "page.html")
    tree = ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    html = "{http://www.w3.org/1999/xhtml}"
    assert json.loads(tree.findtext(f".//{html}script") or "")[NAME] == records
    table = tree.find(f".//{html}table")
    assert table is not None
    assert [["".join(cell.itertext()).strip() for cell in row] for row in table] == [
        ["", NAME],
        ["state", "stopped"],
        ["steps asked for", "1,000"],
        ["step", "2"],
        ["loss", "2.5000"],
        ["validation loss", "2.2500"],
        ["tokens/s", "1,234"],
        ["skipped steps", "3"],
    ]
    # 100 s, of which 20 start the run and 5 wait for data
    assert '<td>training</td><td class="number">75.0 s</td><td class="number">75.0%</td>' in text
    assert "step-00000002" in text


def test_curves_have_a_point_for_each_value(tmp_path: Path) -> None:
    """Heights are linear in the values: of 5, 2.5 and 1.25 the middle one is a third up."""
    records = [_record(1), _record(2), _record(4)]
    text = _page([str(_write_run(tmp_path, records))], tmp_path / "page.html")
    loss = re.findall(r'points="([^"]*)"', text)[0]
    heights = [float(point.split(",")[1]) for point in loss.split()]
    assert len(heights) == 3
    assert (heights[2] - heights[1]) / (heights[2] - heights[0]) == pytest.approx(1 / 3, abs=0.01)
    titles = re.findall(r"<figcaption>(\w+)", text)
    assert titles == ["Loss", "Gradient", "Speed"]  # no MFU: it is not known


def test_the_first_steps_do_not_set_the_scale_of_the_loss(tmp_path: Path) -> None:
    records = [_record(step, loss=500.0 if step == 1 else 4.0 - step / 50, mfu=0.25) for step in range(1, 101)]
    text = _page([str(_write_run(tmp_path, records))], tmp_path / "page.html")
    figure = text.split("<figure>")[1]
    assert "<figcaption>Loss; validation dashed [nats]; above the chart at first, up to 500</figcaption>" in figure
    heights = [float(y) for y in re.findall(r"[\d.]+,([\d.]+)", re.findall(r'points="([^"]*)"', figure)[0])]
    assert len(heights) == 90  # those of the first tenth are higher
    assert max(heights) - min(heights) > 150
    steps = re.findall(r'text-anchor="middle">([\d,]+)<', figure)
    assert steps == ["20", "40", "60", "80", "100"]
    assert '<td>MFU</td><td class="number">25.0%</td>' in text


def test_a_run_that_was_started_again_has_a_mark_there(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [_record(1), _record(2), _record(3)])
    launches = [
        {"started": 0.0, "first": 0, "seen": 9.0, "step": 2},
        {"started": 20.0, "first": 2, "seen": 29.0, "step": 3},
    ]
    (run / "goodput.json").write_text(json.dumps(launches))
    text = _page([str(run)], tmp_path / "page.html")
    assert text.count('stroke-dasharray="1 3"') == 3  # of loss, gradient norm and speed
    assert "Upright lines: the run was started again." in text


def test_a_step_that_was_logged_and_profiled_has_both(tmp_path: Path) -> None:
    profiled = {"step": 2, "breakdown/forward": 0.25, "breakdown/exposed fsdp": 0.75}
    run = _write_run(tmp_path, [_record(1), _record(2), profiled])
    assert read_run_folder(run).records == [_record(1), _record(2) | profiled]
    step = _page([str(run)], tmp_path / "page.html").split("<th>a step of")[1].split("</table>")[0]
    assert re.findall(r"<td>([\w ]+)</td><td class=\"number\">([^<]+)", step) == [
        ("exposed fsdp", "75.0%"),
        ("forward", "25.0%"),
    ]


def test_the_sample_of_a_model_is_shown_whatever_it_wrote(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [_record(1)])
    (run / "sample.txt").write_bytes(b"--- step 1 ---\ndef <f>(\x00\xff\n")
    text = _page([str(run)], tmp_path / "page.html")
    ElementTree.fromstring(text.removeprefix("<!DOCTYPE html>"))
    assert "<pre>--- step 1 ---\ndef &lt;f&gt;(\ufffd\ufffd\n</pre>" in text


def test_sources_have_the_sizes_that_the_run_has_noted(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [_record(1)])
    header: Any = SimpleNamespace(text_bytes=12_100_000)
    lines = ["data.sources.0 (stdlib): 7 documents, 12 tokens to train on; 0.1 epochs in 3 steps"]
    note_sources(run / "sources.txt", lines, {"data.sources.0 (stdlib)": header})
    table = _page([str(run)], tmp_path / "page.html").split("<h2>Data</h2>")[1].split("</table>")[0]
    assert re.findall(r"<td[^>]*>([^<]*)", table) == [
        "stdlib",
        "7 documents, 12 tokens to train on; 0.1 epochs in 3 steps; 12.1 MB of text",
        "1",
    ]


def test_steps_that_were_rolled_back_are_left_out(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [_record(1), _record(2, loss=9.0), _record(3, loss=9.0), _record(2, loss=1.0)])
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "lo')  # the run is writing it
    assert [(record["step"], record["loss"]) for record in read_run_folder(run).records] == [(1, 5.0), (2, 1.0)]


def test_time_is_that_of_the_summary_at_the_end_of_a_run(tmp_path: Path) -> None:
    """Killed 60 s after step 4, of which steps 3 and 4 were done again: 100 + 60 + 50 s, 20 of them for these."""
    run = _write_run(tmp_path, [_record(1)])
    launches = [
        {"started": 0.0, "first": 0, "seen": 100.0, "step": 4, "lost": {"start-up": 60.0}, "last": 9},
        {"started": 160.0, "first": 2, "seen": 210.0, "step": 6, "lost": {"start-up": 10.0}, "is_restart": True},
    ]
    (run / "goodput.json").write_text(json.dumps(launches))
    text = _page([str(run)], tmp_path / "page.html")
    times = re.findall(r"<td>([\w-]+)</td><td class=\"number\">([\d.]+) s</td>", text)
    assert times == [("training", "60.0"), ("start-up", "70.0"), ("restart", "80.0")]


def test_each_stage_has_its_weights(tmp_path: Path) -> None:
    run = _write_run(tmp_path, [_record(1)])
    stages = (MixtureStage(2, (3.0, 1.0)), MixtureStage(0, (0.0, 1.0)))
    data = Data(sources=(Source(), Source(kind="synthetic", weight=5.0)), stage=stages)
    (run / "config.toml").write_text(dump_toml(Config(data=data)))
    table = _page([str(run)], tmp_path / "page.html").split("<h2>Data</h2>")[1].split("</table>")[0]
    assert re.findall(r"<th>(weight[^<]*)", table) == ["weight up to step 2", "weight to the end"]
    assert re.findall(r'class="number">([^<]*)', table) == ["3", "0", "1", "1"]


def test_two_runs_of_one_name_are_told_apart(tmp_path: Path) -> None:
    runs = [str(_write_run(tmp_path / place, [_record(1, loss=loss)])) for place, loss in (("a", 1.0), ("b", 2.0))]
    text = _page(runs, tmp_path / "page.html")
    records = json.loads(text.split('id="records">')[1].split("</script>")[0])
    assert [records[run][0]["loss"] for run in runs] == [1.0, 2.0]


@pytest.mark.parametrize("line", ['{"loss": 1.0}', "[1]", '{"step": 1'])
def test_a_line_that_is_no_record_is_named(line: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = _write_run(tmp_path, [_record(1)])
    metrics = run / "metrics.jsonl"
    metrics.write_text(f'{{"step": 1, "loss": NaN}}\n{line}\n{{"step": 3}}\n')
    with pytest.raises(SystemExit):
        main([str(run)])
    assert "metrics.jsonl:2: not the record of a step" in capsys.readouterr().err
    metrics.write_text(metrics.read_text().replace(f"{line}\n", ""))
    assert read_run_folder(run).records == [{"step": 1, "loss": None}, {"step": 3}]


def test_keys_that_differ_between_runs_are_shown(tmp_path: Path) -> None:
    one, two = (_write_run(tmp_path, [_record(1)], name) for name in ("one", "two"))
    config = two / "config.toml"
    config.write_text(config.read_text().replace("seed = 0", "seed = 7"))
    text = _page([str(one), str(two)], tmp_path / "page.html")
    differing = text.split("Keys that differ")[1].split("</table>")[0]
    assert re.findall(r"<td>(\w+\.\w+)</td>", differing) == ["run.seed"]
    assert "<code>7</code>" in differing


def test_a_real_run_and_wrong_folders(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = _page([str(FIXTURE)], tmp_path / "page.html")
    last = json.loads((FIXTURE / "metrics.jsonl").read_text().splitlines()[-1])
    assert format(last["loss"], LATEST["loss"][1]) in text
    with pytest.raises(SystemExit) as end:
        main([str(tmp_path)])
    assert end.value.code == 2
    assert "no run folder: it has no metrics.jsonl" in capsys.readouterr().err


@pytest.mark.exhaustive
def test_a_browser_draws_it(tmp_path: Path) -> None:
    """On a wide screen and on a phone: a picture of many colors, and nothing on the console."""
    browser = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("needs chromium")
    _page([str(FIXTURE)], tmp_path / "page.html")
    for size in ("1200,1400", "390,1800"):
        picture = tmp_path / f"{size}.png"
        command = [browser, "--headless", "--no-sandbox", f"--window-size={size}", f"--screenshot={picture}"]
        options = ["--enable-logging=stderr", (tmp_path / "page.html").as_uri()]
        done = subprocess.run([*command, *options], capture_output=True, text=True, timeout=120)
        assert "CONSOLE" not in done.stderr
        assert picture.stat().st_size > 20_000  # an empty page has 3,000
