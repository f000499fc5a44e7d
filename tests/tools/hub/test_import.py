"""Published weights: the logits of transformers, its training, and on every layout bitwise those of one process."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from tests.parity import CPU, build, part_of_sequence, rows_of, tiny, world_size
from tests.tools.hub.published import CONFIGS, save_published
from tests.workers import run
from torchllm.config import Config
from torchllm.data.batch import Batch
from torchllm.models.decoder import Decoder, build_model
from torchllm.optim.optimizer import build_optimizer
from torchllm.optim.schedule import LearningRate
from torchllm.parallel.initialize import initialize
from torchllm.parallel.mesh import Mesh
from torchllm.parallel.parallelize import build_forward_backward
from torchllm.tools.config.checks import problems
from torchllm.tools.hub import hf_reader
from torchllm.tools.hub.files import find_hub_files, read_hub_config
from torchllm.tools.hub.hf_reader import read_hub_weights
from torchllm.tools.hub.published_weights import HubWeights
from torchllm.tools.proof.gather import gather_whole
from torchllm.tools.proof.layouts import Settings
from torchllm.train.step import TrainStep

Arrays = dict[str, np.ndarray]
TOKENS = 96
LENGTH = 32
"""tokens of a sequence"""
SEQUENCES = 8
AXES: dict[str, Settings] = {
    "fsdp": {"parallel.dp_shard": 2},
    "hsdp": {"parallel.dp_replicate": 2},
    "tp": {"parallel.tp": 2},
    "sp": {"parallel.tp": 2, "parallel.sequence_parallel": True},
    "1f1b": {"parallel.pp": 2},
    "v": {"parallel.pp": 2, "parallel.schedule": "ZBVZeroBubble"},
    "cp": {"parallel.cp": 2},
    "zero0": {"parallel.dp_shard": 2, "parallel.zero_stage": 0},
    "zero1": {"parallel.dp_shard": 2, "parallel.zero_stage": 1},
    "zero2": {"parallel.dp_shard": 2, "parallel.zero_stage": 2},
}
MORE = {
    "tied": {"tie_word_embeddings": True},
    "uneven": {"vocab_size": 97},
    "stacked": {"stacks": True},
    "small scores": {"query_pre_attn_scalar": 144},
    "whole logits": {"logits_scaling": 1.0},
}
"""forms of the published model: changes of its config.json"""


def layout(axes: tuple[str, ...]) -> Settings:
    settings: Settings = {}
    for axis in axes:
        settings |= AXES[axis]
    return settings


LAYOUTS = [
    ("llama", ("cp", "tp"), ""),
    ("olmo3", ("1f1b", "tp"), "tied"),
    ("gpt2", ("fsdp", "sp"), "uneven"),
    ("qwen3", ("hsdp", "v"), "tied"),
    ("glm4-moe", ("v",), ""),
    ("minimax-m2", ("tp",), ""),
    ("minimax-m2", ("1f1b",), ""),
]
"""every axis but the ZeRO stages is among them"""
MORE_LAYOUTS = [
    ("olmo2", ("cp", "tp"), "tied"),
    ("smollm3-windows", ("v",), "uneven"),
    ("qwen2-windows", ("cp", "fsdp"), ""),
    ("qwen3-moe", ("sp", "zero0"), "uneven"),
    ("qwen2", ("zero2",), ""),
    ("gemma3", ("cp", "sp"), ""),
    ("gemma2", ("v",), "uneven"),
    ("gemma4-dense", ("cp", "sp"), "uneven"),
    ("gemma4-values", ("v",), "tied"),
    ("gemma4-experts", ("v", "sp"), "uneven"),
    ("granite", ("fsdp", "tp"), "tied"),
    ("mistral-nemo", ("sp", "v"), "uneven"),
    ("llama31", ("tp", "zero1"), ""),
    ("mixtral", ("hsdp", "zero1"), "tied"),
    ("deepseek-v3", ("sp", "zero1"), ""),
    ("moonlight", ("cp", "v"), "tied"),
    ("qwen3-next-dense", ("cp", "v"), ""),
    ("qwen3.5", ("cp", "sp"), "tied"),
    ("qwen3.5-groups", ("fsdp", "1f1b"), "uneven"),
    ("qwen3.5-moe", ("sp", "zero1"), "stacked"),
    ("olmo-hybrid", ("v", "tp"), "tied"),
    ("qwen2-moe", ("sp", "zero1"), "stacked"),
    ("ernie4.5", ("cp", "tp"), "uneven"),
    ("ernie4.5-moe", ("sp", "zero1"), "stacked"),
    ("olmo-hybrid-nope", ("cp", "fsdp"), "uneven"),
    ("nanochat", ("sp", "zero1"), "uneven"),
    ("nanochat-linear", ("cp", "v"), "tied"),
]


@pytest.fixture(scope="session")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where published models are written, each when it is first asked for."""
    return tmp_path_factory.mktemp("published")


def publish(folders: Path, name: str, form: str) -> Path:
    folder = folders / f"{name}-{form}"
    if not folder.exists():
        save_published(name, folder, max_shard_size="40KB", **MORE.get(form, {}))
    return folder


def config_of(folder: Path, settings: Settings) -> Config:
    config = tiny(settings)
    model = replace(read_hub_config(folder).model, from_hf=str(folder))
    if model.router_bias:
        model = replace(model, router_bias_rate=0.0)  # transformers does not move it
    if model.score_softcap:
        model = replace(model, attention="eager")  # sdpa has none
    if "training.global_batch_size" not in settings:
        config = replace(config, training=replace(config.training, global_batch_size=SEQUENCES))
    training = replace(config.training, sequence_length=LENGTH, max_grad_norm=0.0)
    if config.parallel.zero_stage != 3 and config.parallel.pp > 1:
        training = replace(training, micro_batch_size=1)
    return replace(config, model=model, training=training)


def tokens_of(step: int) -> Tensor:
    """Return the tokens of a batch and one more per sequence, its last target."""
    generator = torch.Generator().manual_seed(step)
    return torch.randint(0, TOKENS, (SEQUENCES, LENGTH + 1), generator=generator)


def batches(config: Config, mesh: Mesh, step: int) -> list[Batch]:
    """Return this rank's micro batches of a step."""
    tokens = tokens_of(step)
    positions = torch.arange(LENGTH).expand(SEQUENCES, LENGTH)
    whole = Batch(tokens[:, :-1], tokens[:, 1:], positions, None)
    size = config.training.micro_batch_size
    parts = []
    for first in range(mesh.data_rank * size, SEQUENCES, mesh.data_size * size):
        parts.append(part_of_sequence(rows_of(whole, slice(first, first + size)), mesh))
    return parts


class Imported(NamedTuple):
    weights: Arrays
    totals: list[tuple[int, int]]
    """of each rank: bytes read, largest block"""


def read_on_layout(config: Config) -> Imported:
    hf_reader.BLOCK = 1000  # several blocks per tensor
    _, stages = build(config)
    folder = Path(config.model.from_hf)
    hub_config = read_hub_config(folder)
    read_block, sizes = hf_reader._read_block, [0]

    def noted(*arguments: Any) -> bytearray | None:
        content = read_block(*arguments)
        sizes.append(len(content or b""))
        return content

    with mock.patch.object(hf_reader, "_read_block", noted):
        bytes_read = read_hub_weights(find_hub_files(folder, hub_config), hub_config, stages)
    assert bytes_read == sum(sizes)
    whole = gather_whole(stages, lambda parameter: parameter.detach())
    rows: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(rows, (bytes_read, max(sizes)))
    if whole is None:
        return Imported({}, rows)
    assert not whole.findings
    return Imported(whole.tensors, rows)


def check_layout(folder: Path, settings: Settings) -> Imported:
    config = config_of(folder, settings)
    assert not problems(config, world_size(config)), "no layout of the grid is refused for any model"
    imported = run(read_on_layout, world_size(config), config)[0]
    expected = one_process(config)
    stored = {**dict(expected.named_parameters()), **dict(expected.named_buffers())}
    assert imported.weights.keys() == stored.keys()
    for name, tensor in stored.items():
        assert np.array_equal(imported.weights[name], tensor.detach().numpy()), name
    return imported


def error_of_logits(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference of logits, as a share of the largest logit."""
    return float(np.abs(found - expected).max() / np.abs(expected).max())


def one_process(config: Config) -> Decoder:
    with torch.device("meta"):
        model = build_model(config.model)
    initialize([model], config.model, CPU, 0)
    HubWeights(config.model).load([model], None)
    return model


STACKED = ("mixtral", "glm4-moe", "minimax-m2", "deepseek-v3", "glm4-moe-lite", "hy-v3", "qwen3-next", "qwen3.5-moe")
LOGITS = [(name, "") for name in CONFIGS] + [(name, "stacked") for name in STACKED]
MORE_LOGITS = [(name, "tied") for name in CONFIGS] + [(name, "stacked") for name in ("qwen3-moe", "olmoe")]


@pytest.mark.quick
@pytest.mark.parametrize("published", [LOGITS, pytest.param(MORE_LOGITS, marks=pytest.mark.exhaustive)], ids=len)
def test_logits_are_those_of_transformers(published: list[tuple[str, str]], tmp_path: Path) -> None:
    tokens = tokens_of(0)
    errors = {}
    for name, form in published:
        folder = tmp_path / f"{name}-{form}"
        hub_model = save_published(name, folder, **MORE.get(form, {}))
        model = one_process(config_of(folder, {}))
        with torch.no_grad():
            theirs = hub_model(tokens).logits
            ours = model(tokens, torch.arange(LENGTH + 1).expand(SEQUENCES, LENGTH + 1))
        errors[name, form] = error_of_logits(ours.numpy(), theirs.numpy())
    assert {published: error for published, error in errors.items() if not error <= 1e-5} == {}


@pytest.mark.quick
def test_logits_of_a_text_of_several_chunks_are_those_of_transformers(tmp_path: Path) -> None:
    """Gated DeltaNet computes 64 tokens at a time."""
    tokens = torch.randint(0, TOKENS, (3, 150), generator=torch.Generator().manual_seed(1))
    of_qwen = ("qwen3-next", "qwen3-next-dense", "qwen3.5", "qwen3.5-groups", "qwen3.5-moe", "qwen3.5-moe-narrow")
    for name in (*of_qwen, "olmo-hybrid", "olmo-hybrid-nope"):
        hub_model = save_published(name, tmp_path / name)
        model = one_process(config_of(tmp_path / name, {}))
        with torch.no_grad():
            theirs = hub_model(tokens).logits
            ours = model(tokens, torch.arange(150).expand(3, 150))
        assert error_of_logits(ours.numpy(), theirs.numpy()) <= 1e-5, name


@pytest.mark.parametrize(
    ("name", "axes", "form"),
    [*LAYOUTS, *(pytest.param(*layout, marks=pytest.mark.exhaustive) for layout in MORE_LAYOUTS)],
)
def test_a_layout_reads_the_same_weights(name: str, axes: tuple[str, ...], form: str, folders: Path) -> None:
    check_layout(publish(folders, name, form), layout(axes))


def test_ranks_read_their_own_bytes_once_and_hold_one_block(folders: Path) -> None:
    """Counted, of four ranks that share all weights: the sum is the file's tensors, and a rank has a quarter."""
    folder = publish(folders, "llama", "")
    config = read_hub_config(folder)
    files = find_hub_files(folder, config)
    size = sum(tensor.end - tensor.begin for tensor in files.tensors.values())
    totals = check_layout(folder, {"parallel.dp_shard": 4}).totals
    assert sum(read for read, _ in totals) == size
    assert max(read for read, _ in totals) <= 1.01 * size / 4
    assert max(largest for _, largest in totals) <= 1000


SPARSE_LAYOUTS: list[tuple[str, Settings, str]] = [
    ("mixtral", {"parallel.dp_shard": 2, "parallel.tp": 2}, ""),  # by expert, and by features
    ("mixtral", {"parallel.dp_shard": 4}, "stacked"),  # 6 experts: by hidden states
    ("olmoe", {"parallel.dp_shard": 2, "parallel.cp": 2}, ""),
    ("qwen3-moe", {"parallel.dp_shard": 4, "parallel.ep": 2}, ""),
    ("glm4-moe", {"parallel.pp": 2, "parallel.dp_shard": 2}, "stacked"),
    ("gpt-oss", {"parallel.tp": 2, "parallel.pp": 2}, ""),
    ("moonlight", {"parallel.pp": 2, "parallel.dp_shard": 2}, ""),
    ("qwen3-next", {"parallel.dp_shard": 4}, ""),  # 2 key heads, of whose rows a rank has a half
]


@pytest.mark.parametrize(("name", "settings", "form"), SPARSE_LAYOUTS)
def test_experts_of_a_file_become_parts_of_a_stack(name: str, settings: Settings, form: str, folders: Path) -> None:
    """Also counted: no rank reads a byte of an expert that it does not hold, and none twice."""
    folder = publish(folders, name, form)
    imported = check_layout(folder, settings)
    config = read_hub_config(folder)
    files = find_hub_files(folder, config)
    size = sum(tensor.end - tensor.begin for tensor in files.tensors.values())
    shards = {"parallel.dp_shard", "parallel.cp", "parallel.ep"}
    if settings.keys() <= shards:  # each weight is on one rank
        assert sum(read for read, _ in imported.totals) == size
        ranks = len(imported.totals)
        assert max(read for read, _ in imported.totals) <= size / ranks * 1.01


def test_sixteen_bit_weights_are_rounded_to_nothing(tmp_path: Path) -> None:
    """They are read into float32, which holds them exactly."""
    hub_model = save_published("llama", tmp_path, dtype="bfloat16")
    model = one_process(config_of(tmp_path, {}))
    assert torch.equal(model.norm.weight, hub_model.model.norm.weight)  # type: ignore[union-attr]
    assert model.norm.weight.dtype == torch.float32  # type: ignore[union-attr]


def test_new_rows_start_at_random_as_without_the_file(folders: Path) -> None:
    config = config_of(publish(folders, "llama", ""), {})
    larger = replace(config, model=replace(config.model, vocab=100))
    model = one_process(larger)
    with torch.device("meta"):
        random_model = build_model(larger.model)
    initialize([random_model], larger.model, CPU, 0)
    for grown, fresh, read in zip(
        (model.embed_tokens, model.lm_head),
        (random_model.embed_tokens, random_model.lm_head),
        (one_process(config).embed_tokens, one_process(config).lm_head),
        strict=True,
    ):
        assert torch.equal(grown.weight[:96], read.weight)  # type: ignore[union-attr, index]
        assert torch.equal(grown.weight[96:], fresh.weight[96:])  # type: ignore[union-attr, index]


STEPS = 20
COMPARED = 10
"""steps: later ones amplify rounding. Weights of gemma4-dense that differ by 1e-7 move transformers' own losses by 1e-4
after ten steps and by 3e-4 after twenty"""


def train_on_layout(config: Config) -> list[float]:
    """Take AdamW steps from published weights; return the losses."""
    mesh, stages = build(config)
    HubWeights(config.model).load(stages, dist.group.WORLD)
    optimizer = build_optimizer(stages, config.optimizer)
    forward_backward = build_forward_backward(stages, mesh, config.parallel, config.training, torch.float32)
    rate = LearningRate(config.schedule, config.optimizer.learning_rate, config.training.steps)
    train_step = TrainStep(stages, forward_backward, optimizer, rate, mesh, config.training, CPU)
    losses = []
    for step in range(1, STEPS + 1):
        losses.append(float(train_step(step, batches(config, mesh, step)).loss))
    return losses


def train_with_transformers(hub_model: Any, config: Config) -> list[float]:
    """Take the same steps with transformers' model and torch's AdamW, in the usual loop."""
    settings = config.optimizer
    # Biases may be stacked, and taps of convolutions are no matrices here.
    is_vector = {
        name: x.dim() == 1 or name.endswith(("_bias", "conv1d.weight")) for name, x in hub_model.named_parameters()
    }
    decayed = [parameter for name, parameter in hub_model.named_parameters() if not is_vector[name]]
    others = [parameter for name, parameter in hub_model.named_parameters() if is_vector[name]]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": settings.weight_decay}, {"params": others, "weight_decay": 0.0}],
        lr=settings.learning_rate,
        betas=(settings.beta1, settings.beta2),
        eps=settings.epsilon,
    )
    losses = []
    hub_model.train()
    for step in range(1, STEPS + 1):
        tokens = tokens_of(step)
        logits = hub_model(tokens[:, :-1]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss))
    return losses


# With larger scores, Gemma 3's norms of 1 + w make 20 steps chaotic: transformers' own losses in float32 and float64
# then differ by 0.1; with small ones by 3e-6.
TRAINED = [("qwen3", ("fsdp",), "")]
MORE_TRAINED = [
    ("llama31", ("tp",), "uneven"),
    ("gemma3", ("1f1b", "tp"), "small scores"),
    ("olmo3", ("1f1b",), ""),
    ("gemma2", ("sp",), "uneven"),
    ("gemma4-dense", ("tp",), "uneven"),
    ("gemma4-values", ("1f1b",), ""),
    ("gemma4-experts", ("tp",), "uneven"),
    ("granite", ("fsdp",), "whole logits"),  # of divided ones the loss hardly moves in 20 steps
    ("smollm3-windows", ("cp",), ""),
    ("ministral", ("v",), "uneven"),
    ("qwen3-moe", ("fsdp",), ""),
    ("glm4-moe", ("tp",), "uneven"),
    ("minimax-m2", ("1f1b", "tp"), ""),
    ("deepseek-v3", ("tp",), ""),
    ("moonlight", ("sp",), "uneven"),
    ("olmoe", ("fsdp",), ""),
    ("qwen2", ("fsdp", "sp"), "uneven"),
    ("gpt-oss", ("fsdp",), ""),
    ("glm4-moe-lite", ("tp",), ""),
    ("hy-v3", ("fsdp", "sp"), ""),
    ("seed-oss", ("tp",), "uneven"),
    ("qwen3-next", ("tp",), ""),
    ("qwen3.5", ("cp",), ""),
    ("qwen3.5-groups", ("fsdp",), ""),
    ("qwen3.5-moe", ("sp",), "uneven"),
    ("olmo-hybrid", ("sp",), ""),
    ("qwen2-moe", ("tp",), "uneven"),
    ("ernie4.5", ("sp",), "uneven"),
    ("ernie4.5-moe", ("tp",), "uneven"),
    ("nanochat", ("sp",), "uneven"),
    ("nanochat-linear", ("1f1b",), ""),
]


@pytest.mark.parametrize(
    ("name", "axes", "form"), [*TRAINED, *(pytest.param(*run, marks=pytest.mark.exhaustive) for run in MORE_TRAINED)]
)
def test_training_follows_the_loop_of_transformers(name: str, axes: tuple[str, ...], form: str, tmp_path: Path) -> None:
    """Also where tp pads the rows of the vocabulary."""
    hub_model = save_published(name, tmp_path / "model", **MORE.get(form, {}))
    config = config_of(tmp_path / "model", layout(axes))
    config = replace(
        config,
        model=replace(config.model, vocab_padding=-config.model.vocab % config.parallel.tp),
        training=replace(config.training, steps=STEPS),
        schedule=replace(config.schedule, name="constant"),
    )
    losses = run(train_on_layout, world_size(config), config)[0]
    untrained = hub_model(tokens_of(STEPS)[:, :-1], labels=tokens_of(STEPS)[:, :-1]).loss.item()
    expected = train_with_transformers(hub_model, config)
    assert abs(expected[-1] - untrained) > 0.01 * untrained
    differences = np.abs(np.array(losses) - np.array(expected))[:COMPARED]
    assert differences.max() <= 1e-4 * expected[0]
