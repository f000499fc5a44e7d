"""recipes/plan.py from its command line."""

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from recipes.plan import main
from recipes.sweep.sweep import main as sweep
from torchllm.config.errors import UserError
from torchllm.tools.config.load import load_config
from torchllm.tools.planner.predict import predict
from torchllm.tools.planner.search.layouts import layout_of
from torchllm.tools.planner.search.question import read_hardware, read_model

ROOT = Path(__file__).parents[2]
RANK = ["rank", "--model", "llama_13b", "--cluster", "dgx_a100", "--gpus", "16"]
RANK += ["--sequence-length", "2048", "--global-batch-size", "512"]
FIXED = ["--recompute.mode=none", "--parallel.schedule=1F1B", "--parallel.cp=1"]
"""keys that make a search one of a second"""
FEW = [*RANK, *FIXED]
LONG = ["--sequence-length=8192", "--global-batch-size=64"]
SMALL = ["rank", "--model=llama3_1b", "--cluster=dgx_h100", "--sequence-length=2048", "--global-batch-size=64"]


@pytest.fixture(autouse=True)
def no_dry_run(monkeypatch: pytest.MonkeyPatch) -> None:
    """Write files without a dry run, which takes some seconds: `test_written.py` has one."""
    monkeypatch.setattr("torchllm.tools.planner.search.written.traced_peak", lambda file, gpus: None)


def test_rank_says_the_ten_best_and_why(capsys: pytest.CaptureFixture[str]) -> None:
    main([*RANK, "--tokens", "1e12"])
    output = capsys.readouterr().out
    heading, sizes, batch, ranking, *_ = output.splitlines()
    assert sizes.startswith("14B parameters: 40 blocks of 5,120, vocabulary of 128,000; torchllm ")
    assert heading == "llama_13b on 16 x A100-SXM4-80GB (dgx_a100)"
    assert batch == "sequences of 2,048 tokens, 512 per step (1,048,576 tokens)"
    assert ranking.startswith("The best 10 of ")
    assert "10. " in output
    assert "of a step, " in output
    assert "GPU-hours" in output
    assert "Rejected:" in output
    for title in ("the simple one", "the fastest we would bet on", "the fastest if the model is right"):
        assert f"\n{title}: " in output
    assert "\nTake the first: " in output
    assert "\ntorchllm is not measured on A100-SXM4-80GB.\n" in output


def test_the_written_run_is_one_that_the_config_accepts(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("WORLD_SIZE", "NNODES", "NPROC"):
        monkeypatch.delenv(name, raising=False)
    file = tmp_path / "mine.toml"
    main([*FEW, "--json", "--write", str(file), "--tokens", "1e11"])
    [plan] = json.loads(capsys.readouterr().out)
    config = load_config([str(file), "--run.dry_run=true"])
    first = plan["picks"][0]
    best = first["layout"]
    assert (config.parallel.pp, config.parallel.tp) == (best["pp"], best["tp"])
    assert config.training.micro_batch_size == best["micro_batch_size"]
    assert config.training.steps == round(1e11 / 512 / 2048)
    assert config.cluster.name == "dgx_a100"
    assert config.model.hidden == 5120
    header = file.read_text()
    assert f"srun --nodes=2 ./run_train.sh {file}" in header
    assert f"{first['step_seconds']:.4g} s per step" in header
    assert "# not measured on this GPU" in header.splitlines()


def test_keys_of_the_command_line_are_set_or_bounded(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As every recipe takes them; with a key that no layout has, it is the run's and is written."""
    file = tmp_path / "mine.toml"
    words = ["--parallel.pp=2", "--max", "parallel.tp=2", "--max=training.micro_batch_size=1", "--model.vocab=50304"]
    main([*SMALL, "--gpus=8", *words, "--optimizer.name=muon", "--json", "--write", str(file)])
    [plan] = json.loads(capsys.readouterr().out)
    layouts = [ranked["layout"] for ranked in plan["best"]]
    assert len(layouts) == 10
    assert {layout["pp"] for layout in layouts} == {2}
    assert {layout["tp"] for layout in layouts} <= {1, 2}
    assert {layout["micro_batch_size"] for layout in layouts} == {1}
    written = read_model(str(file)).config
    assert (written.model.vocab, written.optimizer.name) == (50304, "muon")


@pytest.mark.parametrize(
    ("words", "refused"),
    [
        (["--compile.graphs=true", "--data.document_mask=true"], "compile.graphs: each micro batch has another number"),
        (["--float8.recipe=rowwise", "--training.dtype=float32"], 'training.dtype: float8.recipe = "rowwise" rounds'),
    ],
)
def test_what_a_run_would_refuse_is_said(words: list[str], refused: str, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, *FIXED, "--gpus=8", *words])
    assert f"--check refuses {refused}" in capsys.readouterr().err


def test_explain_takes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    main([*SMALL, *FIXED, "--gpus=8", "--write", str(file)])
    capsys.readouterr()
    main(["explain", str(file), "--parallel.tp=4", "--parallel.dp_shard=2", "--parallel.dp_replicate=1"])
    assert "yours: dp_shard 2, tp 4" in capsys.readouterr().out
    with pytest.raises(UserError, match=r"^--max parallel.tp=1: the run has 4$"):
        main(["explain", str(file), "--parallel.tp=4", "--parallel.dp_shard=2", "--max=parallel.tp=1"])


def test_the_best_number_of_gpus_up_to_a_limit(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, *FIXED, "--gpus=<=20", "--json"])
    [plan] = json.loads(capsys.readouterr().out)
    assert plan["gpus"] == 16
    main([*SMALL, *FIXED, "--gpus=20"])
    assert "\nFewer GPUs train faster: 16 make " in capsys.readouterr().out


@pytest.mark.parametrize(
    "words",
    [
        ["--model=llama3_8b", "--gpus=4", *LONG, "--parallel.pp=1", "--parallel.cp=1", "--dials"],
        ["--model=llama3_8b", "--gpus=8", "--sequence-length=32768", "--global-batch-size=64"],
        ["--model=llama3_8b", "--gpus=8", *LONG, "--optimizer.offload=true"],
        pytest.param(
            ["--model=qwen3_30b_a3b", "--gpus=64", "--sequence-length=4096", "--global-batch-size=256"],
            marks=pytest.mark.exhaustive,
        ),
        ["--model={tmp_path}/segments.toml", "--gpus=8", *LONG, "--recompute.mode=segment"],
    ],
)
def test_the_plan_of_a_written_run_is_the_printed_one(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A file that lacked a key which the plan has changed would train otherwise than planned."""
    file, base = tmp_path / "mine.toml", ROOT / "train_configs/models/llama3_8b.toml"
    segments = f"base = {str(base)!r}\n[recompute]\nmode = 'segment'\nk = 4\n"  # of which a plan takes no k
    (tmp_path / "segments.toml").write_text(segments)
    words = [word.format(tmp_path=tmp_path) for word in words]
    main(["rank", "--cluster=dgx_a100", *words, "--json", "--write", str(file), "--accept-risk"])
    load_config([str(file), "--run.dry_run=true"])  # refuses no key
    [plan] = json.loads(capsys.readouterr().out)
    [first] = [pick for pick in plan["picks"] if "reason" in pick]
    written = read_model(str(file))
    job = written.job(read_hardware("dgx_a100"), plan["gpus"])
    prediction = predict(job.case(layout_of(written.config)))
    assert prediction.step == pytest.approx(first["step_seconds"], rel=1e-12)
    assert written.config.recompute == job.recompute(layout_of(written.config))
    assert prediction.memory.total / 2**30 == pytest.approx(first["memory_gib"], rel=1e-12)


@pytest.mark.exhaustive
def test_dials_leave_keys_that_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["--model=llama3_8b", "--gpus=4", *LONG, "--parallel.pp=1", "--dials", "--json"]
    keys = []
    for more in ([], ["--training.weights_dtype=float32"]):
        main(["rank", "--cluster=dgx_a100", *FIXED[1:], *words, *more])
        [plan] = json.loads(capsys.readouterr().out)
        assert plan["dials"][-1]["step_seconds"] == pytest.approx(plan["best"][0]["step_seconds"])
        keys.append({key.partition(" ")[0] for dialed in plan["dials"] for key in dialed["keys"]})
    assert "training.weights_dtype" in keys[0]
    assert "training.weights_dtype" not in keys[1]


def test_the_runs_to_measure_are_a_sweep(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--gpus=16", "--write-sweep", str(tmp_path)])
    sweep(["--dry-run", str(tmp_path)])
    named, _, listed = capsys.readouterr().out.partition("\nRejected:")
    lines = [line for line in listed.splitlines() if line.startswith(("--", " ("))]
    assert len(lines) == 6
    assert all(re.search(r"\(predicted [\d.]+ s, ", line) for line in lines), lines
    assert len(set(lines)) == 6
    assert tomllib.loads((tmp_path / "sweep.toml").read_text())["sweep"]["launcher"].startswith("srun --nodes=2 ")
    assert "(--write-sweep FOLDER writes them), then `plan.py calibrate`:" in named


def test_a_wide_interval_is_no_advice(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchllm.tools.planner.search.advice.WIDEST", 1.1)
    main([*SMALL, *FIXED, "--gpus=8"])
    output = capsys.readouterr().out
    assert "Take the first" not in output
    assert "\nWhich is the fastest is not known: the first's step is known to a factor of " in output


def test_a_layout_that_may_not_fit_is_written_only_if_the_risk_is_accepted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With --objective memory the first row is taken, whatever its risk; here every layout has one."""
    monkeypatch.setattr("torchllm.tools.planner.validity.out_of_memory", lambda case, memory: 0.3)
    file = tmp_path / "mine.toml"
    with pytest.raises(UserError, match=r"^--write: .* runs out of memory in 30 of 100 cases .* --accept-risk"):
        main([*FEW, "--write", str(file)])
    assert not file.exists()
    main([*FEW, "--write", str(file), "--accept-risk"])
    assert file.exists()


def test_a_run_is_explained_beside_the_first_pick(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "mine.toml"
    main([*SMALL, "--gpus=8", "--write", str(file)])
    capsys.readouterr()
    main(["explain", str(file)])
    assert "They are the same layout." in capsys.readouterr().out
    text = file.read_text()
    slow = {"pp": "1", "dp_replicate": "1", "dp_shard": "1", "cp": "1", "tp": "8", "sequence_parallel": "true"}
    for key, value in slow.items():
        text = re.sub(rf"^{key} = .*$", f"{key} = {value}", text, flags=re.MULTILINE)
    file.write_text(text)
    main(["explain", str(file)])
    output = capsys.readouterr().out
    assert "tensor parallel" in output
    assert "activations" in output
    assert "Why not yours: it is predicted " in output
    file.write_text(text.replace("tp = 8", "tp = 3"))
    with pytest.raises(UserError, match=r"mine.toml:\d+: parallel\."):
        main(["explain", str(file)])
    child = tmp_path / "child.toml"
    child.write_text('base = "mine.toml"\n[training]\nsteps = 5\n')
    with pytest.raises(UserError, match=r"mine.toml:\d+: parallel\."):  # where the key is written
        main(["explain", str(child)])
    file.write_text(text.replace("dp_shard = 1", "dp_shard = -1"))
    with pytest.raises(UserError, match="ranks is unknown: set --gpus, or give a degree"):
        main(["explain", str(file)])
    main(["explain", str(file), "--gpus", "8"])


def test_experts_are_ranked(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["rank", "--model", "olmoe_1b_7b", "--cluster", "dgx_h100", "--gpus", "8"]
    words += ["--sequence-length", "4096", "--global-batch-size", "64", *FIXED, "--imbalance"]
    main([*words, "1.5"])
    output = capsys.readouterr().out
    assert "The best 10 of " in output
    assert "experts of the busiest rank get 1.5 times the mean number of rows" in output
    with pytest.raises(SystemExit):
        main([*words, "0.9"])
    assert "--imbalance: must be at least 1, which is even, not '0.9'" in capsys.readouterr().err


def test_a_written_run_has_data_and_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clusters = ROOT / "train_configs" / "clusters"
    (tmp_path / "mine.toml").write_text((clusters / "dgx_a100.toml").read_text())
    monkeypatch.chdir(tmp_path)
    arguments = list(FEW)
    arguments[arguments.index("dgx_a100")] = "mine.toml"
    main([*arguments, "--write", "run.toml"])
    assert "run.toml: [data] is Python's standard library as bytes, to try the layout." in capsys.readouterr().err
    config = load_config(["run.toml", "--run.dry_run=true"])
    assert config.cluster.name == str(tmp_path / "mine.toml")
    assert '[data]\ntokenizer = "bytes"\n\n[[data.sources]]\nkind = "stdlib"\n' in Path("run.toml").read_text()


def test_sizes_and_data_may_be_in_the_models_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    base = ROOT / "train_configs/models/llama_13b.toml"
    sizes = "[schedule]\nwarmup_steps = 50\n[training]\nsequence_length = 1024\nglobal_batch_size = 64\n"
    Path("mine.toml").write_text(f"base = {str(base)!r}\n{sizes}[[data.sources]]\nkind = 'text'\npath = 'a.txt'\n")
    words = ["rank", "--model=mine.toml", "--cluster=dgx_a100", "--gpus=8", *FIXED]
    main([*words, "--write=again.toml"])
    printed = capsys.readouterr()
    assert printed.out.splitlines()[2] == "sequences of 1,024 tokens, 64 per step (65,536 tokens)"
    assert printed.err == "wrote again.toml\n"
    (source,) = load_config(["again.toml", "--run.dry_run=true"]).data.sources
    assert source.path == "a.txt"
    main([*words, "--write=few_steps", "--tokens=1e6"])
    refused = "--check refuses schedule.warmup_steps: 50 is over training.steps 15"
    assert capsys.readouterr().err == f"wrote few_steps\nfew_steps: {refused}\n"
    assert Path("few_steps").read_text().startswith(f"# {refused}\n# ")


def test_several_numbers_of_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    words = [*SMALL, *FIXED, "--gpus=8,16"]
    main(words)
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:3]] == ["GPUs", "8", "16"]
    main([*words, "--objective", "gpu_hours", "--json"])
    first, second = json.loads(capsys.readouterr().out)
    hours = [plan["picks"][0]["step_seconds"] * plan["gpus"] for plan in (first, second)]
    assert hours == sorted(hours)


def without(option: str) -> list[str]:
    place = RANK.index(option)
    return [*RANK[:place], *RANK[place + 2 :]]


ONE_SEARCH = r"^--dials: needs one number of --gpus, and no --objective memory$"
REFUSED = [
    ([*RANK, "--parallel.pq=1"], r"^--parallel.pq: unknown key; did you mean parallel\.\w+\?$"),
    ([*RANK, "--parallel.pp=two"], r"^--parallel.pp: "),
    ([*RANK, "--max=model.layers=2"], r"^--max model.layers=2: must be KEY=NUMBER, and KEY one of training.micro_ba"),
    ([*RANK, "--training.sequence_length=1"], r"^--sequence-length and --training.sequence_length are the same key"),
    ([*RANK, "--check"], r"^--check: unknown argument"),
    ([*RANK, "--cluster.name=dgx_h100"], r"^--cluster.name: give --cluster"),
    ([*RANK, "--data.sources.0.path=x"], r"^--data.sources.0.path: an element of an array has no effect on a plan"),
    ([*RANK, "other.toml"], r"^other.toml: unknown argument; overrides are --section.key=value"),
    ([*SMALL, "--gpus=8", "--parallel.pp=3"], r"no valid layout on 8 GPUs: no mesh has the degrees that are set"),
    ([*SMALL, "--gpus=8,16", "--dials"], ONE_SEARCH),
    ([*SMALL, "--gpus=8", "--objective=memory", "--dials"], ONE_SEARCH),
    ([*RANK, "--imbalance", "1.5"], r"^--imbalance: .*llama_13b.toml has no experts: remove it$"),
    (without("--sequence-length"), r"^--sequence-length is missing: .*llama_13b\.toml has no training\."),
    (without("--global-batch-size"), r"^--global-batch-size is missing: .*llama_13b\.toml has no training\."),
    ([*without("--gpus"), "--gpus=43"], "no valid layout on 43 GPUs: .*; 42 GPUs would work"),
    ([*without("--gpus"), "--gpus=90000"], "the cluster has 4480"),
    ([*without("--gpus"), "--gpus=1"], "no layout fits in the 79.2 GiB of one A100"),
    ([*without("--model"), "--model=llama_13"], r"not in train_configs/models .*; did you mean llama_13b\?"),
    ([*without("--cluster"), "--cluster=dgx_a10"], 'did you mean "dgx_a100"?'),
]


def test_what_is_wrong_is_said() -> None:
    for words, message in REFUSED:
        with pytest.raises(UserError, match=message):
            main(words)


def test_it_starts_without_torch_and_numpy() -> None:
    program = "import runpy, sys; sys.modules['torch'] = sys.modules['numpy'] = None\n"
    program += "sys.argv = ['plan.py', '--help']\ntry: runpy.run_path('recipes/plan.py', run_name='__main__')\n"
    program += "except SystemExit as end: assert not end.code\n"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert "calibrate measured.csv" in done.stdout


def test_calibrate_a_table(tmp_path: Path) -> None:
    """Of the first five rows; tests/test_readme.py has all."""
    rows = (ROOT / "docs/sweep/results.csv").read_text().splitlines(keepends=True)
    (tmp_path / "few.csv").write_text("".join(rows[:6]))
    main(["calibrate", str(tmp_path / "few.csv"), "-o", str(tmp_path / "mine.toml")])
    assert read_hardware(str(tmp_path / "mine.toml")).gpu == read_hardware("this_cpu").gpu


STAGES = """base = "{root}/train_configs/models/llama3_1b.toml"
[cluster]
name = "dgx_h100"
[training]
steps = 1000
micro_batch_size = 1
global_batch_size = 64
sequence_length = 2048
[parallel]
dp_shard = 4
[[data.sources]]
kind = "stdlib"
[[data.stage]]
until = 400
[[data.stage]]
global_batch_size = 8
sequence_length = 65536
"""


def test_stages_of_several_sizes_are_planned_together(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A layout that fits in the first stage may not fit in the second."""
    file = tmp_path / "stages.toml"
    file.write_text(STAGES.format(root=ROOT))
    main(["explain", str(file)])
    lines = capsys.readouterr().out.splitlines()
    yours, found = lines.index("yours: dp_shard 4, micro batch 1, zero 3"), len(lines) - 5
    assert lines[found].startswith("the fastest over 2 stages: ")
    short, long, hours = lines[yours + 2 : found]
    assert re.search(r" fits +400 +64 +2,048  data\.stage\.0$", short)
    assert re.search(r" does not fit +600 +8 +65,536  data\.stage\.1$", long)
    steps = [float(line.split()[0]) for line in (short, long)]
    assert float(hours.split()[0]) == pytest.approx((400 * steps[0] + 600 * steps[1]) / 3600, rel=2e-3)
    rank = ["rank", f"--model={file}", "--cluster=dgx_h100", *FIXED, "--parallel.pp=1"]
    main([*rank, "--gpus=4"])
    *_, ranked, _, short, long, hours, last = capsys.readouterr().out.splitlines()
    assert ranked.startswith("The fastest over 2 stages: ")
    for line in (short, long, *lines[found + 2 : found + 4]):
        assert " fits " in line
    assert hours.endswith(" hours in all")
    assert last == 'A run takes it with parallel.layout = "auto", if its file sets none of these keys.'
    for option in ("--dials", "--json", "--tokens=1e9", "--write=x.toml", "--global-batch-size=8"):
        with pytest.raises(UserError, match=rf"^{option.split('=')[0]}: .* has stages of several sizes"):
            main([*rank, "--gpus=4", option])
    with pytest.raises(UserError, match=r"--imbalance: .* has no experts: remove it"):
        main([*rank, "--gpus=4", "--imbalance=2"])
    with pytest.raises(UserError, match="give one number of --gpus"):
        main([*rank, "--gpus=8,16"])
    with pytest.raises(UserError, match="the cluster has"):
        main([*rank, "--gpus=99999"])
