"""--check finds what a run lacks, before any process is started and without torch."""

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from tests.config.conftest import RANK_VARIABLES, enter_empty_folder, refusal
from tests.tiny_run import DEBUG, ROOT
from torchllm.checkpoint.manifest import Manifest, publish, write_file
from torchllm.config import Data, Source
from torchllm.config.errors import DataError
from torchllm.data.corpus import Corpus
from torchllm.data.readers import ReaderSettings
from torchllm.data.tokenizer import ByteTokenizer, load_tokenizer
from torchllm.tools.front import preflight
from torchllm.tools.front.resolve import load_run
from torchllm.tools.front.start import load_configs
from torchllm.tools.prepare.cache import is_cached, plan_corpus, prepare_cached

TEXT_SOURCE = ["--data.sources.0.kind=text", "--data.sources.0.path=words.txt"]
TOKENS_OF_NANOGPT = [
    *("--data.sources.0.kind=nanogpt", "--data.sources.0.path=n.bin", "--data.dtype=uint16", "--data.separator=1")
]
SHORT = "--training.sequence_length=32"


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with a text, a cache of its own, and an environment of two processes not started yet."""
    enter_empty_folder(tmp_path, monkeypatch)
    monkeypatch.setenv("NPROC", "2")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "words.txt").write_text("some words " * 100)
    return tmp_path


def write_tokenizer(path: Path) -> None:
    words = {"<|endoftext|>": 0} | {f"word{number}": number for number in range(1, 300)}
    tokenizer = Tokenizer(WordLevel(words, unk_token="<|endoftext|>"))
    tokenizer.add_special_tokens(["<|endoftext|>"])
    tokenizer.save(str(path))


def write_checkpoint(root: Path, step: int, data: dict[str, Any] | None = None) -> Path:
    temporary, final = root / "new", root / f"step-{step:08d}"
    temporary.mkdir(parents=True)
    files = {"index.json": write_file(temporary / "index.json", b"{}")}
    publish(temporary, final, Manifest(step, data or {}, {}, 1, {}, files))
    return final


def prepare(folder: Path) -> Path:
    source = Source("text", str(folder / "words.txt"))
    data = Data((source,), cache=str(folder / "shards"), validation_fraction=0.0)
    plan = plan_corpus(source, ReaderSettings(data, 264, ByteTokenizer()))
    return prepare_cached(plan, data)


def checked(*arguments: str) -> None:
    load_configs([str(ROOT / DEBUG), *arguments, "--check"])


class Lack(NamedTuple):
    arguments: list[str]
    line: str
    """what is said; FOLDER stands for the folder, SHARDS for the corpus that is prepared in it"""
    make: Callable[[Path], object] = lambda folder: None
    """what is done to the folder first"""


PREPARED = ["--data.sources.0.kind=tokens", "--data.sources.0.path=SHARDS"]
LACKS = {
    "data file": Lack(
        ["--data.sources.0.kind=text", "--data.sources.0.path=word.txt"],
        "--data.sources.0.path: no file matches 'word.txt' (kind 'text')",
    ),
    "a URL of the web": Lack(
        ["--data.sources.0.kind=text", "--data.sources.0.path=https://host/a.txt"],
        "--data.sources.0.path: 'https://host/a.txt' is a URL of the web, and no storage's",
    ),
    "JSON lines": Lack(
        ["--data.sources.0.kind=jsonl", "--data.sources.0.path=a.parquet"],
        "--data.sources.0.path: a.parquet:1: broken JSON (Expecting value: line 1 column 1 (char 0)); by its name the "
        'file is for kind = "parquet"',
        lambda folder: (folder / "a.parquet").write_text("id,text\n1,one\n"),
    ),
    "a text long enough to hold out a sequence": Lack(
        [*TEXT_SOURCE, SHORT],
        "debug.toml:39: evaluate.interval: nothing is held out to evaluate on, or less than 32 tokens: set it to 0 or, "
        "in a new run, set data.validation_fraction = 0.031 or more",
    ),
    "a text that is not yet tokenized for one sequence": Lack(
        [*TEXT_SOURCE, "--training.sequence_length=2048"],
        "'words.txt' is shorter than one sequence of training.sequence_length = 2048 tokens: it has 1,091 to train "
        "on; set that to 1090 or less, or read more text",
    ),
    "special tokens": Lack(
        ["--data.fim_rate=0.5"],
        "debug.toml: data.fim_tokens: data.tokenizer 'bytes' has no special token '<|fim_prefix|>'",
    ),
    "special tokens that are named": Lack(
        [*TEXT_SOURCE, "--data.fim_rate=0.5", "--data.fim_tokens=a,b,c"],
        "--data.fim_tokens: data.tokenizer 'bytes' has no special token 'a'",
    ),
    "whole documents": Lack(
        [*TOKENS_OF_NANOGPT, "--data.packing=best_fit"],
        '--data.packing: "best_fit" needs whole documents',
        lambda folder: (folder / "n.bin").write_bytes(bytes([1, 0, 2, 0]) * 1000),
    ),
    "shards": Lack(
        ["--data.sources.0.kind=tokens", "--data.sources.0.path=nowhere"],
        "--data.sources.0.path: nowhere holds no token shards: there is no corpus.json",
    ),
    "one shard": Lack(
        [*PREPARED, SHORT],
        "--data.sources.0.path: SHARDS/00000.train.bin",
        lambda folder: (prepare(folder) / "00000.train.bin").unlink(),
    ),
    "the tokenizer of the shards": Lack(
        [*PREPARED, "--data.tokenizer=words.json", "--model.vocab=600"],
        "--data.sources.0.path: SHARDS holds tokens of 'bytes', but data.tokenizer is 'words.json'",
        lambda folder: (prepare(folder), write_tokenizer(folder / "words.json")),
    ),
    "held-out documents": Lack(
        [*PREPARED, SHORT, "--evaluate.interval=1"], "--evaluate.interval: nothing is held out to evaluate on", prepare
    ),
    "text for one sequence": Lack(
        [*PREPARED, "--training.sequence_length=2048"],
        "--data.sources.0.path: 'SHARDS' is shorter than one sequence of training.sequence_length = 2048 tokens",
        prepare,
    ),
    "text to evaluate on": Lack(
        ["--data.validation.0.kind=text", "--data.validation.0.path=word.txt"],
        "--data.validation.0.path: no file matches 'word.txt' (kind 'text')",
    ),
    "a text to evaluate on of one sequence": Lack(
        ["--data.validation.0.kind=text", "--data.validation.0.path=words.txt", "--training.sequence_length=2048"],
        "tokens: it has 1,102 to evaluate on; set that to 1101 or less, or read more text",
    ),
    "tokenizer": Lack(["--data.tokenizer=gpt2"], "--data.tokenizer: there is no file 'gpt2'"),
    "vocabulary": Lack(
        [*TEXT_SOURCE, "--data.tokenizer=words.json", "--model.vocab=299"],
        "--model.vocab: 299 is less than the 300 ids of data.tokenizer 'words.json': set it to 300 or more",
        lambda folder: write_tokenizer(folder / "words.json"),
    ),
    "vocabulary for bytes": Lack(
        ["--model.vocab=257"],
        "--model.vocab: 257 is less than the 258 ids of data.tokenizer 'bytes': set it to 258 or more",
    ),
    "small text": Lack(
        [*TEXT_SOURCE, "--data.max_raw_mib=0.0001"],
        "--data.sources.0.path: 'words.txt' is 0 MiB; only 0 MiB (data.max_raw_mib) are tokenized at the start",
    ),
    "folder for metrics": Lack(
        ["--run.folder=run"],
        "--run.folder: 'run' cannot be written: FOLDER/run/tensorboard: Not a directory",
        lambda folder: ((folder / "run").mkdir(), (folder / "run/tensorboard").touch()),
    ),
    "file system that can be written": Lack(
        ["--run.folder=/proc/run"], "--run.folder: '/proc/run' cannot be written: /proc: "
    ),
    "cache": Lack(
        [],
        "debug.toml: data.cache: 'FOLDER/cache/torchllm' cannot be written: FOLDER/cache: Not a directory",
        lambda folder: (folder / "cache").touch(),
    ),
    "checkpoint": Lack(
        ["--checkpoint.resume=run/checkpoints/step-00000003"],
        "--checkpoint.resume: run/checkpoints/step-00000003: there is no such checkpoint folder",
    ),
    "whole checkpoint": Lack(
        ["--checkpoint.resume=step-00000003"],
        "--checkpoint.resume: step-00000003/index.json",
        lambda folder: (write_checkpoint(folder, 3) / "index.json").unlink(),
    ),
    "place for the steps after a checkpoint": Lack(
        ["--checkpoint.resume=step-00000003", "--run.folder=run"],
        "--checkpoint.resume: names step 3, but run/checkpoints/step-00000004 is newer",
        lambda folder: (write_checkpoint(folder / "run/checkpoints", 4), write_checkpoint(folder, 3)),
    ),
    "empty folder": Lack(
        ["--checkpoint.resume=none", "--run.folder=run"],
        '--checkpoint.resume: is "none", but run/checkpoints/step-00000004 exists',
        lambda folder: write_checkpoint(folder / "run/checkpoints", 4),
    ),
}


@pytest.mark.parametrize("lack", LACKS.values(), ids=LACKS)
def test_what_a_run_lacks_is_said_in_one_line(lack: Lack, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    lack.make(folder)
    (shards,) = [*folder.glob("shards/*")] or [folder]
    arguments = [argument.replace("SHARDS", str(shards)) for argument in lack.arguments]
    lines = refusal(capsys, lambda: checked(*arguments))
    assert len([line for line in lines if not line.startswith(" ")]) == 1, lines
    assert lack.line.replace("FOLDER", str(folder)).replace("SHARDS", str(shards)) in lines[0]


def test_all_lacks_are_said_at_once_with_what_is_wrong_in_the_config(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--run.folder=words.txt", "--checkpoint.resume=x", "--data.tokenizer=x", "--parallel.tp=3"]
    lines = refusal(capsys, lambda: checked(*arguments, "--data.sources.0.kind=text", "--data.sources.0.path=x"))
    keys = {line.split(": ")[0] for line in lines}
    assert {"--run.folder", "--checkpoint.resume", "--data.tokenizer", "--data.sources.0.path", "--parallel.tp"} <= keys


def test_best_fit_fills_up_what_is_shorter_than_a_sequence(folder: Path) -> None:
    best_fit = ["--data.packing=best_fit", "--data.document_mask=true", "--training.sequence_length=2048"]
    validation = ["--data.validation.0.kind=text", "--data.validation.0.path=words.txt"]
    shards = str(prepare(folder))
    prepared = ["--data.sources.0.kind=tokens", f"--data.sources.0.path={shards}", "--evaluate.interval=0"]
    for arguments in ([*TEXT_SOURCE, "--data.validation_fraction=0.031"], validation, prepared):
        with pytest.raises(SystemExit, match="0"):
            checked(*arguments, *best_fit)


def test_the_advice_for_a_short_text_cures_it(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for advised in ("--data.validation_fraction=0.031", "--evaluate.interval=0"):
        with pytest.raises(SystemExit, match="0"):
            checked(*TEXT_SOURCE, SHORT, advised)
    data = Data((Source("text", "words.txt"),), cache=str(folder / "shards"), validation_fraction=0.031)
    corpus = Corpus(prepare_cached(plan_corpus(data.sources[0], ReaderSettings(data, 264, ByteTokenizer())), data))
    assert corpus.count("validation", 32) == 1


def test_values_to_fill_in_are_said_at_once_with_what_else_is_missing(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sources = '[[data.sources]]\nkind = "text"\npath = "SET"\n[[data.sources]]\nkind = "text"\npath = "nowhere"\n'
    text = f'[training]\nsteps = "SET"\n[data]\ntokenizer = "SET"\n{sources}[run]\nfolder = "/proc/run"\n'
    for base, more in (("debug.toml", {"data.sources.1.path", "run.folder"}), ("models/SET.toml", {"models/SET.toml"})):
        (folder / "mine.toml").write_text(f'base = "{base}"\n{text}')
        lines = refusal(capsys, lambda: load_configs(["mine.toml", "--check"]))
        keys = {line.split(": ")[1] for line in lines}
        assert keys == {"training.steps", "data.tokenizer", "data.sources.0.path", *more}, base
        assert len([line for line in lines if 'is still "SET", a value to fill in: it must be' in line]) == 3


def test_what_cannot_be_looked_at_is_listed(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, line in [
        (["--data.sources.0.kind=hub", "--data.sources.0.path=a/b"], "data.sources.0 (a/b): the hub needs the network"),
        (TEXT_SOURCE, "data.sources.0 (words.txt): its text is read when the run starts"),
    ]:
        with pytest.raises(SystemExit, match="0"):
            checked(*arguments, "--evaluate.interval=0")
        assert capsys.readouterr().err.splitlines()[0] == f"not checked: {line}", arguments


def test_a_run_that_lacks_nothing_is_not_talked_about(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    shards = prepare(folder)
    for arguments in ([], ["--data.sources.0.kind=tokens", f"--data.sources.0.path={shards}", SHORT]):
        with pytest.raises(SystemExit, match="0"):
            checked(*arguments, "--evaluate.interval=0")
        assert capsys.readouterr().err.startswith("global batch")
    assert {path.name for path in folder.iterdir()} == {"words.txt", "shards"}  # a look leaves nothing behind


def test_a_cache_of_another_user_that_may_not_be_read(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def denied(path: Path, *arguments: str) -> None:
        raise PermissionError(errno.EACCES, "Permission denied", str(path))

    monkeypatch.setattr(Path, "open", denied)  # root may read everything
    with pytest.raises(
        DataError, match=r"^data\.cache: .* cannot be read \(Permission denied\): another user has made"
    ):
        is_cached(folder / "jsonl-1")
    (line,) = refusal(capsys, lambda: load_configs([*TEXT_SOURCE, SHORT]))
    assert line.startswith("defaults: data.cache: ")


def test_what_a_dry_run_never_reads_may_be_missing(folder: Path) -> None:
    missing = ["--run.dry_run=true", "--data.tokenizer=gpt2", "--run.folder=/proc/run", "--checkpoint.resume=x"]
    (config,) = load_configs([str(ROOT / DEBUG), *missing])
    assert config.data.tokenizer == "gpt2"


def test_the_ranks_do_not_look_again(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """There may be 16,384 of them, and run_train.sh has looked."""
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setattr("torchllm.tools.front.preflight.inspect_training", None)
    load_configs([str(ROOT / DEBUG), "--run.folder=run"])


def test_bytes_have_as_many_ids_as_their_tokenizer() -> None:
    assert load_tokenizer("bytes").vocab == preflight.BYTES_VOCAB


def test_a_broken_file_beside_the_tokenizers_is_named(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(name: str) -> None:
        json.loads("{")

    monkeypatch.setattr("torchllm.data.tokenizer.load_tokenizer", load)
    (line,) = refusal(capsys, lambda: checked("--data.tokenizer=words.txt"))
    assert line.startswith("--data.tokenizer: words.txt cannot be read: JSONDecodeError(")


@pytest.mark.parametrize("kind", ["tokenizer", "tokens"])
def test_it_needs_no_torch(kind: str, folder: Path) -> None:
    """Nor numpy where only Python's own library is read: tests/tools/front/test_resolve.py."""
    arguments = [str(ROOT / DEBUG), "--check"]
    if kind == "tokens":
        arguments += ["--data.sources.0.kind=tokens", f"--data.sources.0.path={prepare(folder)}", SHORT]
        arguments += ["--evaluate.interval=0"]
    if kind == "tokenizer":
        write_tokenizer(folder / "words.json")
        arguments += [*TEXT_SOURCE, "--data.tokenizer=words.json", "--model.vocab=600"]
    program = "import sys\nsys.modules['torch'] = None\n"
    program += "from torchllm.tools.front.start import load_configs\nload_configs(sys.argv[1:])\n"
    environment = {key: value for key, value in os.environ.items() if key not in RANK_VARIABLES}
    environment |= {"NPROC": "2", "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-c", program, *arguments]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_a_recipe_that_uses_weights_wants_a_checkpoint(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [str(ROOT / DEBUG), "--run.folder=run"]
    lines = refusal(capsys, lambda: load_run(arguments, one_device=True))
    assert lines == ["--run.folder: run/checkpoints holds no checkpoint; name a run, or checkpoint.resume"]
    named = write_checkpoint(folder / "run/checkpoints", 3)
    assert load_run(arguments, one_device=True).parallel.ranks == 1
    shutil.rmtree(named)
    (line,) = refusal(capsys, lambda: load_run([*arguments, f"--checkpoint.resume={named}"], one_device=True))
    assert line == f"--checkpoint.resume: {named}: there is no such checkpoint folder"


FLOAT8 = ["--float8.recipe=rowwise", "--training.dtype=bfloat16"]
FLASH = ["--model.attention=flash", "--training.dtype=bfloat16"]


def hide(monkeypatch: pytest.MonkeyPatch, gpus: int, *packages: str) -> None:
    """Give this process a number of GPUs, and none of these packages."""
    monkeypatch.setattr(preflight, "count_gpus", lambda: gpus)
    monkeypatch.setattr("torchllm.tools.front.resolve.count_gpus", lambda: 0)  # nothing is compiled
    found = preflight.find_spec
    monkeypatch.setattr(preflight, "find_spec", lambda name: None if name in packages else found(name))


def test_what_the_machine_lacks_is_refused_before_torch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for gpus, words, line in (
        (0, ["--run.device=cuda"], '--run.device: is "cuda", but no driver shows this process a GPU'),
        (0, FLASH, '--model.attention: "flash" needs a GPU, and this is a CPU: use "sdpa" or "eager"'),
        (8, [*FLASH, "--run.device=cpu"], '--model.attention: "flash" needs a GPU, and this is a CPU'),
        (8, FLASH, '--model.attention: "flash" needs the package flash-attn: install an extra'),
        (
            0,
            ["--model.attention=flex"],
            '--model.attention: "flex" needs a GPU, and this is a CPU: use "sdpa" or "eager"',
        ),
        (0, FLOAT8, "--float8.recipe: needs the package torchao: install the extra"),
        (8, FLOAT8, "--float8.recipe: needs the package torchao: install the extra"),
    ):
        with monkeypatch.context() as patched:
            hide(patched, gpus, "torchao", "flash_attn", "flash_attn_interface")
            (refused,) = refusal(capsys, lambda: load_configs([str(ROOT / DEBUG), *words, "--check"]))  # noqa: B023
        assert refused.startswith(line), words
    monkeypatch.setattr(preflight, "find_spec", lambda name: name)  # every package is installed
    (refused,) = refusal(capsys, lambda: load_configs([str(ROOT / DEBUG), FLOAT8[0], "--check"]))
    assert "training.dtype: auto is float32 on a CPU, and float8 rounds bfloat16: set it to bfloat16" in refused
    unchecked(FLOAT8, capsys)


def unchecked(words: list[str], capsys: pytest.CaptureFixture[str]) -> list[str]:
    """Return the lines about facts that a check, which must succeed, leaves open."""
    with pytest.raises(SystemExit) as ended:
        load_configs([str(ROOT / DEBUG), *words, "--check"])
    assert ended.value.code == 0, words
    return [line for line in capsys.readouterr().err.splitlines() if line.startswith("not checked: ")]


def test_what_only_torch_knows_is_not_unchecked(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = "whether torch has kernels for the GPUs of the run"
    hide(monkeypatch, 0, "torchao", "flash_attn", "flash_attn_interface")
    assert unchecked(["--run.device=cuda", *FLOAT8, "--gpus=2"], capsys) == [
        f"not checked: run.device, float8.recipe: {unknown}"
    ]
    assert unchecked([*FLASH, "--gpus=2"], capsys) == [f"not checked: model.attention: {unknown}"]
    assert unchecked(["--gpus=2"], capsys) == []
    hide(monkeypatch, 8)
    assert unchecked(["--model.attention=flex"], capsys) == [f"not checked: model.attention: {unknown}"]
