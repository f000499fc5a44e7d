"""What is wrong with the files of a published model: found before a GPU waits, all at once, by file, tensor and key."""

import json
import os
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.tools.hub.published import save_published
from torchllm.tools.hub import files as hub_files
from torchllm.tools.hub.files import check_tensors, find_hub_files, read_hub_config
from torchllm.tools.hub.safetensors_header import HubFileError

FIRST = "model-00001-of-00002.safetensors"
NORM = "model.norm.weight"
Tensors = dict[str, torch.Tensor]


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny Llama in two files with an index."""
    folder = tmp_path_factory.mktemp("llama")
    save_published("llama", folder, max_shard_size="70KB")
    assert (folder / FIRST).exists()
    return folder


@pytest.fixture
def folder(original: Path, tmp_path: Path) -> Path:
    shutil.copytree(original, tmp_path / "llama")
    return tmp_path / "llama"


def problems_of(folder: Path, **changes: Any) -> list[str]:
    config = read_hub_config(folder)
    files = find_hub_files(folder, config)
    model = replace(config.model, **changes)
    found = check_tensors(files, config, model, is_tying_chosen="tied_embeddings" in changes)
    return [problem.replace(f"{folder}/", "").replace(str(folder), "FOLDER") for problem in found]


def with_index(change: Callable[[dict[str, str]], object]) -> Callable[[Path], None]:

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors.index.json"
        table = json.loads(path.read_text())
        change(table["weight_map"])
        path.write_text(json.dumps(table))

    return damage


def with_tensors(change: Callable[[Tensors], object]) -> Callable[[Path], None]:
    """Return a damage of the tensors: they are written to one file without an index."""

    def damage(folder: Path) -> None:
        tensors: Tensors = {}
        for path in sorted(folder.glob("*.safetensors")):
            tensors |= load_file(path)
            path.unlink()
        change(tensors)
        (folder / "model.safetensors.index.json").unlink()
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})

    return damage


def cut(folder: Path) -> None:
    content = (folder / FIRST).read_bytes()
    (folder / FIRST).write_bytes(content[:-5])


def pickle(folder: Path) -> None:
    for path in [*folder.glob("*.safetensors"), folder / "model.safetensors.index.json"]:
        path.unlink()
    (folder / "pytorch_model.bin").write_bytes(b"")


def rename_tensor(tensors: Tensors) -> None:
    tensors["model.norm.wait"] = tensors.pop(NORM)


DAMAGES: dict[str, tuple[Callable[[Path], object], list[str]]] = {
    "cut short": (cut, [f"{FIRST}: model.layers"]),
    "git-lfs pointer": (
        lambda folder: (folder / FIRST).write_bytes(b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n"),
        [f"{FIRST}: is a pointer of git-lfs in place of the file: run `git lfs pull`"],
    ),
    "no header": (lambda folder: (folder / FIRST).write_bytes(b"\x01"), [f"{FIRST}: is cut short, or no safetensors"]),
    "damaged header": (
        lambda folder: (folder / FIRST).write_bytes(b"\x02" + bytes(7) + b"[]"),
        [f"{FIRST}: is no safetensors file"],
    ),
    "superfluous bytes": (
        lambda folder: (folder / FIRST).open("ab").write(b"more"),
        [f"{FIRST}: has "],
    ),
    "missing file": (lambda folder: (folder / FIRST).unlink(), [f"{FIRST}: cannot be read: No such file"]),
    "pickled": (pickle, ["FOLDER: holds neither model.safetensors.index.json nor model.safetensors; its .bin files"]),
    "path up": (
        with_index(lambda places: places.update({NORM: "../x.safetensors"})),
        [f"model.safetensors.index.json: weight_map: {NORM}: '../x.safetensors' is not the plain name"],
    ),
    "index without a tensor": (
        with_index(lambda places: places.pop(NORM)),
        [": model.norm.weight: is not in model.safetensors.index.json"],
    ),
    "index with another file": (
        with_index(lambda places: places.update({"model.more.weight": FIRST})),
        [f"{FIRST}: model.more.weight: is missing, but model.safetensors.index.json says"],
    ),
    "missing tensor": (
        with_tensors(lambda tensors: tensors.pop(NORM)),
        [f"FOLDER: {NORM}: is missing; it must be [32]"],
    ),
    "renamed tensor": (
        with_tensors(rename_tensor),
        [f"FOLDER: {NORM}: is missing", "model.safetensors: model.norm.wait: no part of a model of type 'llama'"],
    ),
    "wrong shape": (
        with_tensors(lambda tensors: tensors.update({NORM: torch.ones(31)})),
        [f"model.safetensors: {NORM}: is [31], but by config.json it must be [32]"],
    ),
    "wrong dtype": (
        with_tensors(lambda tensors: tensors.update({NORM: torch.ones(32, dtype=torch.int8)})),
        [f"model.safetensors: {NORM}: is I8; weights can be read that are F64, F32, F16, BF16"],
    ),
}


def test_a_damage_is_named_with_file_and_tensor(original: Path, tmp_path: Path) -> None:
    for name, (damage, expected) in DAMAGES.items():
        folder = Path(shutil.copytree(original, tmp_path / name))
        damage(folder)
        found = sorted(problems_of(folder))
        assert len(found) == len(expected), name
        for problem, text in zip(found, sorted(expected), strict=True):
            assert text in problem, name


def test_one_file_is_read_before_those_of_an_index_as_transformers_does(folder: Path) -> None:
    """transformers leaves both after a save in several files and another one in one file."""
    tensors: Tensors = {}
    for path in folder.glob("*.safetensors"):
        tensors |= load_file(path)
    tensors[NORM] = torch.full((32,), 7.0)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder)
    assert torch.equal(theirs.model.norm.weight, tensors[NORM])
    for is_stale in (False, True):
        if is_stale:
            (folder / FIRST).unlink()
        files = find_hub_files(folder, read_hub_config(folder))
        assert files.problems == []
        assert files.tensors[NORM].file == "model.safetensors"
        (note,) = files.notes
        assert note.startswith(f"{folder}/model.safetensors is read, as transformers does; model.safetensors.index")


def test_an_adapter_beside_the_weights_is_refused(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")
    (problem,) = problems_of(folder)
    assert problem.startswith(
        "FOLDER: holds adapter_config.json next to the weights: transformers would read the model"
    )


def become_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", FIRST, "model.safetensors"])
def test_a_fifo_or_a_device_is_refused_at_once(name: str, folder: Path) -> None:
    for become, kind in ((become_fifo, "a FIFO"), (lambda path: path.symlink_to("/dev/zero"), "a device")):
        (folder / name).unlink(missing_ok=True)
        become(folder / name)
        try:
            found = "\n".join(problems_of(folder))
        except HubFileError as error:
            found = str(error)
        assert f"{name}: cannot be read: is {kind}, not a regular file" in found


def test_files_that_are_too_large_to_be_those_of_a_model_are_refused(folder: Path) -> None:
    with (folder / FIRST).open("wb") as file:
        file.write((1 << 26).to_bytes(8, "little"))
        file.truncate(1 << 27)
    assert problems_of(folder) == [f"{FIRST}: its header has 67108864 bytes, over the 16777216 of any model"]
    os.truncate(folder / "config.json", 1 << 32)
    with pytest.raises(HubFileError, match=r"config.json: cannot be read: has over 64 MiB"):
        read_hub_config(folder)


def test_buffers_of_old_versions_are_ignored(folder: Path) -> None:
    buffer = {"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}
    with_tensors(lambda tensors: tensors.update(buffer))(folder)
    assert problems_of(folder) == []


def test_a_block_that_predicts_the_token_after_the_next_is_not_read(tmp_path: Path) -> None:
    """Files of Hy3 hold it as the block after the last one, those of Qwen as mtp; of other types it is an error.

    That of GLM-4.5 is read: test_multi_token.py.
    """
    after_last = {"model.layers.4.eh_proj.weight": torch.ones(4), "model.layers.4.shared_head.weight": torch.ones(4)}
    beside = {"mtp.fc.weight": torch.ones(4), "mtp.layers.0.mlp.gate.weight": torch.ones(4)}
    for name, more, expected in (
        ("hy-v3", after_last, 0),
        ("qwen3-next", beside, 0),
        ("qwen3.5", beside, 0),
        ("qwen3-moe", after_last, 2),
        ("qwen3", beside, 2),
    ):
        folder = tmp_path / name
        save_published(name, folder, max_shard_size="40KB")
        with_tensors(lambda tensors, more=more: tensors.update(more))(folder)
        assert len(problems_of(folder)) == expected


def test_keys_may_lack_the_prefix(folder: Path) -> None:
    def strip(tensors: Tensors) -> None:
        for key in list(tensors):
            tensors[key.removeprefix("model.")] = tensors.pop(key)

    with_tensors(strip)(folder)
    assert problems_of(folder) == []


def test_a_list_of_many_problems_ends(folder: Path) -> None:
    with_tensors(lambda tensors: [tensors.pop(key) for key in list(tensors)[1:]])(folder)
    found = problems_of(folder)
    assert len(found) == hub_files.LISTED + 1
    assert found[-1].endswith("problems of other tensors")


@pytest.mark.parametrize("difference", [0.0, 1.0])
def test_a_head_of_a_tied_model_must_be_the_embedding_unless_tying_is_chosen(
    folder: Path, difference: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hub_files, "BYTES_AT_A_TIME", 1000)

    def tie(tensors: Tensors) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
        tensors["lm_head.weight"][-1, -1] += difference

    with_tensors(tie)(folder)
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"tie_word_embeddings": True}))
    found = problems_of(folder)
    assert len(found) == (1 if difference else 0)
    assert all("lm_head.weight: differs from model.embed_tokens.weight" in problem for problem in found)
    assert problems_of(folder, tied_embeddings=True) == []
    assert problems_of(folder, tied_embeddings=False) == []


def test_a_config_that_is_no_table_is_refused(folder: Path) -> None:
    for content, message in (("[]", "must hold a table"), ("{", "is not JSON"), ("{}", "model_type: is missing")):
        (folder / "config.json").write_text(content)
        with pytest.raises(HubFileError, match=message):
            read_hub_config(folder)
    (folder / "config.json").unlink()
    with pytest.raises(HubFileError, match=r"config.json: cannot be read: No such file"):
        read_hub_config(folder)


def test_values_that_do_not_fit_each_other_are_named_by_the_fields_of_the_file(folder: Path) -> None:
    path = folder / "config.json"
    content = json.loads(path.read_text())
    llama3 = {"rope_type": "llama3", "factor": 2.0, "low_freq_factor": 4.0, "high_freq_factor": 4.0, "rope_theta": 1e4}
    for change, line in (
        ({"num_key_value_heads": 3}, "num_key_value_heads: 3 key-value heads do not divide 4 heads"),
        ({"head_dim": 7}, "head_dim: rotary positions need an even head width, not 7"),
        ({"rope_parameters": llama3}, "rope_parameters.high_freq_factor: must be over model.rope_low_frequency_factor"),
    ):
        path.write_text(json.dumps(content | change))
        with pytest.raises(HubFileError, match=re.escape(f"{path}: {line}")):
            read_hub_config(folder)
