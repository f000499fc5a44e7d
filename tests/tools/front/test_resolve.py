"""What a recipe calls first: the config with a planned layout and a checked cluster."""

import errno
import os
import subprocess
import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest

from tests.config.conftest import RANK_VARIABLES, enter_empty_folder, refusal
from tests.tiny_run import DEBUG, ROOT
from torchllm.config import Config
from torchllm.tools.config.degrees import obstacle_to_compiled_blocks
from torchllm.tools.front import resolve
from torchllm.tools.front.preflight import Inspection
from torchllm.tools.front.resolve import TUNED, load_model
from torchllm.tools.front.start import load_configs
from torchllm.tools.launch import start_lines
from torchllm.tools.planner.cluster import FOLDER
from torchllm.tools.planner.search import auto

CLUSTERS = ", ".join(sorted(file.stem for file in FOLDER.glob("*.toml")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working folder, and an environment of one node with two processes that are not started yet."""
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("NPROC", "2")
    return tmp_path


def lines_of_refusal(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    return refusal(capsys, lambda: load_configs(arguments))


def test_an_unknown_cluster_is_named_with_all_other_errors(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "x.toml").write_text('[cluster]\nname = "dgx_h10"\n[training]\nsteps = 0\n[model]\nkv_heads = 3\n')
    unknown = f'"dgx_h10" is not in train_configs/clusters ({CLUSTERS}); did you mean "dgx_h100"?'
    assert lines_of_refusal(["x.toml", "--check"], capsys) == [
        "x.toml:4: training.steps: must be a whole number of at least 1, not 0",
        f"x.toml:2: cluster.name: {unknown}",
        "x.toml:6: model.kv_heads: 3 key-value heads do not divide 8 heads",
    ]


def test_a_cluster_file_of_the_users_is_checked(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = (FOLDER / "dgx_h100.toml").read_text()
    (folder / "mine.toml").write_text(text)
    with pytest.raises(SystemExit, match="0"):
        load_configs(["--cluster.name=mine.toml", "--check"])
    capsys.readouterr()
    (folder / "mine.toml").write_text(text.replace("gpus_per_node", "gpus_per_nod"))
    (line,) = lines_of_refusal(["--cluster.name=mine.toml", "--check"], capsys)
    assert line == "mine.toml:3: gpus_per_nod: unknown section or key; did you mean gpus_per_node?"


def test_the_planner_sets_the_layout_and_says_which(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    (config,) = load_configs([str(ROOT / DEBUG), "--parallel.layout=auto", "--run.device=cpu", "--run.folder=a"])
    assert config.parallel.layout == "manual"
    assert config.parallel.ranks == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("layout: ")
    assert "layouts of 2 ranks on this_cpu, predicted" in line
    assert line.endswith("GiB per rank; this_cpu has figures of 8 ranks on another CPU")


def test_what_is_told_is_told_once(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Not by ranks other than 0, nor after run_train.sh, whose --check has said it."""
    arguments = [str(ROOT / DEBUG), "--parallel.layout=auto", "--run.device=cpu", "--run.folder=a"]
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    load_configs(arguments)
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("TORCHLLM_LAUNCHED", "0")
    load_configs(arguments)
    assert capsys.readouterr().err == ""
    with pytest.raises(SystemExit, match="0"):
        load_configs([*arguments, "--check"])
    assert capsys.readouterr().err.startswith("layout: ")


def test_rank_0_says_that_it_imports(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    spoken: list[str] = []
    monkeypatch.setattr(start_lines, "_speak", lambda: spoken.append("importing"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    for rank, lines in (("1", 0), ("0", 1)):
        monkeypatch.setenv("RANK", rank)
        load_configs(["--run.folder=run", "--run.device=cpu"])
        assert len(spoken) == lines


def test_tune_returns_several_layouts_of_one_run(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    configs = load_configs([str(ROOT / DEBUG), "--parallel.layout=tune", "--run.device=cpu"])
    assert len(configs) == TUNED
    assert len({config.parallel for config in configs}) > 1
    assert {config.run.folder for config in configs} == {"runs/debug-7"}
    layout = {name: getattr(configs[0], name) for name in ("parallel", "recompute", "training")}
    assert {replace(config, **layout) for config in configs} == {configs[0]}


def test_a_layout_for_an_unknown_number_of_ranks_is_refused(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("NPROC")
    line, *_ = lines_of_refusal(["--parallel.layout=auto", "--check"], capsys)
    unknown = "the number of ranks is unknown: set NPROC (and NNODES), or --gpus=N for --check"
    assert line == f"--parallel.layout: is auto, but {unknown}"


def test_nothing_is_planned_for_a_config_with_errors(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def choose(*arguments: object) -> None:
        raise AssertionError("the planner was asked")

    monkeypatch.setattr(auto, "choose_layouts", choose)
    lines = lines_of_refusal(["--parallel.layout=auto", "--training.steps=0", "--check"], capsys)
    assert lines == ["--training.steps: must be a whole number of at least 1, not 0"]


def test_the_sources_of_a_recipe_with_data_of_its_own_are_not_looked_at(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An iterable of token lists needs no tokenizer."""
    monkeypatch.setenv("NPROC", "1")
    files = ["--data.tokenizer=no/such.json", "--data.sources.0.kind=text", "--data.sources.0.path=no/such.txt"]
    for arguments in (["--model.vocab=128"], files):
        words = [str(ROOT / DEBUG), "--check", *arguments]
        assert lines_of_refusal(words, capsys)
        with pytest.raises(SystemExit) as ended:
            load_configs(words, reads_sources=False)
        assert ended.value.code == 0, capsys.readouterr().err
        capsys.readouterr()


def test_a_recipe_that_does_not_count_epochs_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    for uses_epochs in [True, False]:
        arguments = [str(ROOT / DEBUG), "--parallel.dp_shard=1", "--finetune.epochs=2", "--check"]
        with pytest.raises(SystemExit) as ended:
            load_configs(arguments, uses_epochs=uses_epochs)
        assert ended.value.code == 0, uses_epochs
        line = "--finetune.epochs: does nothing in this run: it needs RECIPE=recipes/finetune.py"
        assert (line in capsys.readouterr().err) != uses_epochs, uses_epochs


def notes_of_check(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the notes of a training that is checked, without those of debug.toml."""
    with pytest.raises(SystemExit) as ended:
        load_configs([str(ROOT / DEBUG), "--parallel.dp_shard=1", *words, "--check"])
    assert ended.value.code == 0, words
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("--")]


def test_keys_that_other_recipes_read_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    average = ["--evaluate.ema=true", "--optimizer.ema_decay=0.9"]
    assert notes_of_check(["--export.folder=a", "--export.ema=true", "--finetune.chat_template=b"], capsys) == [
        "--export.folder, --export.ema: do nothing in this run: they need recipes/export.py, after the training; "
        "--finetune.chat_template: does nothing in this run: it needs RECIPE=recipes/finetune.py"
    ]
    assert notes_of_check([*average, "--evaluate.interval=0"], capsys) == [
        "--evaluate.ema: does nothing in this run: it needs evaluate.interval or evaluate.tasks_interval over 0, or "
        "recipes/evaluate.py"
    ]
    assert notes_of_check(average, capsys) == []


def test_a_chunk_of_all_tokens_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert notes_of_check(["--training.loss_chunk=255"], capsys) == []  # of 2 x 128 tokens
    assert notes_of_check(["--training.loss_chunk=256"], capsys) == [
        "--training.loss_chunk: 256 is not under the 256 tokens of a micro batch, so it divides nothing"
    ]


def test_steps_of_the_command_line_come_before_epochs_of_a_file(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (folder / "x.toml").write_text("[finetune]\nepochs = 2.0\n[training]\nsteps = 9\n")
    words = ["x.toml", "--run.folder=a", "--run.dry_run=true"]
    unused = "does nothing in this run: "
    for more, epochs, told in (
        ([], 2.0, f"x.toml:4: training.steps: {unused}finetune.epochs decides"),
        (["--training.steps=3"], 0.0, f"x.toml:2: finetune.epochs: {unused}the command line sets training.steps"),
        (["--finetune.epochs=1", "--training.steps=3"], 1.0, f"--training.steps: {unused}finetune.epochs decides"),
    ):
        (config,) = load_configs([*words, *more], uses_epochs=True)
        assert config.finetune.epochs == epochs
        assert capsys.readouterr().err.splitlines() == [told]
    (folder / "child.toml").write_text('base = "x.toml"\n[finetune]\nepochs = 1.0\n')
    load_configs(["child.toml", *words[1:]], uses_epochs=True)
    assert capsys.readouterr().err == ""  # it replaces the steps of its base
    (folder / "child.toml").write_text('base = "x.toml"\n[training]\nsteps = 5\n')
    load_configs(["child.toml", *words[1:]], uses_epochs=True)
    assert capsys.readouterr().err == f"child.toml:3: training.steps: {unused}finetune.epochs decides\n"


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pretend that this machine has GPUs, and a compiler for them."""
    monkeypatch.setattr(resolve, "count_gpus", lambda: 2)
    monkeypatch.setattr(resolve, "lack_of_gpu_compiler", lambda: "")
    monkeypatch.setenv("WORLD_SIZE", "2")


def compiled(*arguments: str) -> tuple[object, object]:
    (config,) = load_configs([str(ROOT / DEBUG), "--run.folder=a", *arguments])
    return config.compile.block, config.compile.loss


PIPELINE = ("--parallel.pp=2", "--parallel.dp_shard=1", "--parallel.schedule=ZBVZeroBubble", "--model.layers=4")


def test_on_a_gpu_auto_compiles_what_the_layout_allows(folder: Path, gpu: None) -> None:
    for arguments, expected in [
        ((), (True, True)),
        (("--compile.block=false",), (False, True)),
        (("--run.device=cpu",), (False, False)),
        (("--run.device=cpu", "--compile.block=true"), (True, False)),
        (PIPELINE, (False, True)),
        (("--parallel.cp=2", "--recompute.mode=full"), (False, True)),
        (("--run.dry_run=true", "--cluster.name=this_cpu"), (False, False)),
        (("--model.experts=8",), (True, True)),
    ]:
        assert compiled(*arguments) == expected, arguments


def test_auto_compiles_nothing_without_a_gpu_and_says_nothing(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(resolve, "count_gpus", lambda: 0)
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert compiled() == (False, False)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(resolve, "count_gpus", lambda: 0)
    assert compiled("--run.dry_run=true", "--cluster.name=dgx_h100") == (True, True)  # it has a compiler
    monkeypatch.setattr(resolve, "AMD_DRIVER", folder)
    load_configs(["--run.folder=run", "--run.device=cpu"])
    assert capsys.readouterr().err == ""
    load_configs(["--run.folder=run"])
    assert "run.device: auto is the CPU, but this machine has AMD's driver" in capsys.readouterr().err


def test_why_a_gpu_compiles_less_is_told(
    folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for lack, arguments, says in (
        ("Triton is not installed", (), "compile.block, compile.loss: auto is false: Triton is not installed"),
        ("", PIPELINE, "compile.block: auto is false: ZBVZeroBubble computes gradients of inputs and weights separat"),
    ):
        monkeypatch.setattr(resolve, "lack_of_gpu_compiler", lambda lack=lack: lack)
        compiled(*arguments)
        (line,) = [line for line in capsys.readouterr().err.splitlines() if "compile" in line]
        assert line.startswith(f"{ROOT / DEBUG}: {says}")


@pytest.mark.parametrize("layout", ["auto", "tune"])
def test_planned_layouts_compile_what_they_allow(
    folder: Path, gpu: None, monkeypatch: pytest.MonkeyPatch, layout: str
) -> None:
    monkeypatch.setattr(auto, "device", lambda: "NVIDIA H100 80GB HBM3")
    configs = load_configs([str(ROOT / DEBUG), f"--parallel.layout={layout}", "--run.folder=a", *PIPELINE])
    assert {(config.compile.block, config.compile.loss) for config in configs} == {(False, True)}
    configs = load_configs([str(ROOT / DEBUG), f"--parallel.layout={layout}", "--run.folder=a"])
    for config in configs:
        parallel = config.parallel
        obstacle = obstacle_to_compiled_blocks(parallel.pp, parallel.schedule, parallel.cp, config.recompute.mode)
        assert config.compile.block is (obstacle is None)


RECIPE = """
import sys
from torchllm.tools.front import resolve
from torchllm.tools.front.start import load_configs
try:
    load_configs(sys.argv[1:])
finally:
    heavy = {"torch", "numpy"} & sys.modules.keys()
    assert not heavy, heavy
    ours = [name for name in sys.modules if name.startswith("torchllm.")]
    assert len(ours) <= MOST_MODULES, ours
"""
MOST_MODULES = 41
"""of ours that a check imports, a tenth of a second; one registers what tools read, four are parts that blocks have"""


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--training.step=3", "--parallel.tp=3"], 2, "--training.step: unknown key; did you mean training.steps?"),
        (["--check"], 0, "global batch"),
        (["--help"], 0, "usage: "),
    ],
)
def test_a_check_imports_little_and_says_how_it_ends(arguments: list[str], status: int, says: str) -> None:
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES} | {"NPROC": "2"}
    command = [
        sys.executable,
        "-c",
        RECIPE.replace("MOST_MODULES", str(MOST_MODULES)),
        "train_configs/debug.toml",
        *arguments,
    ]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == status, done.stderr
    assert says in done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_the_data_that_a_plan_writes_is_said_to_stand_in(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    said = "data.sources: is Python's standard library as bytes, to try the layout, and model.vocab = 128,256 is of"
    (folder / "x.toml").write_text('base = "models/llama3_8b.toml"\n[data]\ntokenizer = "bytes"\n')
    for arguments, is_said in (
        ([], True),
        (["--model.vocab=264"], False),
        (["--data.sources.0.kind=synthetic"], False),
    ):
        with suppress(SystemExit):
            load_configs(["x.toml", "--parallel.dp_shard=2", "--training.global_batch_size=2", "--check", *arguments])
        assert (said in capsys.readouterr().err) == is_said


def test_a_folder_that_may_not_be_looked_into_is_one_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def inspect(config: Config, **_: object) -> Inspection:
        raise PermissionError(errno.EACCES, "Permission denied", "/home/other/run/metrics.jsonl")

    monkeypatch.setattr("torchllm.tools.front.preflight.inspect_training", inspect)
    (folder / "x.toml").touch()
    [line] = refusal(capsys, lambda: load_configs(["x.toml", "--check"]))
    assert line == "/home/other/run/metrics.jsonl: cannot be read: Permission denied"


def test_a_chat_says_that_it_answers_the_prompt_of_the_run(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / "run/checkpoints/step-00000001").mkdir(parents=True)
    (folder / "run.toml").write_text('[run]\nfolder = "run"\n[generate]\nchat = true\nprompt = "def "\n')
    note = 'run.toml:5: generate.prompt: "def " is the message: --generate.prompt= answers what you type'
    load_model(["run.toml"])
    assert note in capsys.readouterr().err
    for words in (["--generate.prompt="], ["--generate.prompt=Who?"], ["--generate.chat=false"]):
        load_model(["run.toml", *words])
        assert "is the message" not in capsys.readouterr().err
