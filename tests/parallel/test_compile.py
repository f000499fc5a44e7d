"""torch.compile: the same model to rounding, one compilation for all blocks, no gradient lost to tensor parallelism.

Most cases use a backend that traces, differentiates and partitions as the real one does but runs torch's own kernels:
what goes wrong between compilation and parallelism goes wrong there too, in a fifth of the time.
"""

import functools
import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from torch._dynamo.testing import CompileCounter
from torch._dynamo.utils import counters
from torch.distributed.tensor import Placement, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

import torchllm.parallel.compile
import torchllm.parallel.tensor
from tests.parity import Settings, Trained, build, compare, reference, tiny, train, world_size
from tests.workers import WorkerFailed, run
from torchllm.config import Kinds
from torchllm.config.applied_keys import new_training
from torchllm.config.schema import MixtureStage
from torchllm.parallel.tensor import VocabParallelEmbedding
from torchllm.tools.watch.text_ranks import TextRanks

FSDP2: Settings = {"parallel.dp_shard": 2}
SP2: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
TWO: Settings = {"model.layers": 2, "training.micro_batch_size": 2}
TRACED = "aot_eager_decomp_partition"
NORM, BLOCK, LOSS = ({f"compile.{scope}": True} for scope in ("norm", "block", "loss"))
exhaustive = pytest.mark.exhaustive


def torchs_embedding(hidden: Placement) -> RowwiseParallel:
    return RowwiseParallel(input_layouts=Replicate(), output_layouts=hidden)


def train_compiled(
    settings: Settings, backend: str, cache: str = "", embedding: Any = VocabParallelEmbedding
) -> tuple[Trained | None, int, int]:
    torch.compiler.reset()
    counters.clear()
    compiled = functools.partial(torch.compile, backend=backend)
    with (
        mock.patch.dict(os.environ, {"TORCHINDUCTOR_CACHE_DIR": cache} if cache else {}),
        mock.patch.object(torch, "compile", compiled),
        mock.patch.object(torchllm.parallel.tensor, "VocabParallelEmbedding", embedding),
    ):
        trained = train(settings)
    torch.compiler.reset()
    return trained, counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())


def graphs_of_blocks(lengths: tuple[int, ...]) -> int:
    """Compute three kinds of blocks with sequences of each length, with gradients and without; return the graphs.

    Texts of other lengths are rated after them.
    """
    stages = tuple(MixtureStage(until=step, sequence_length=length) for step, length in enumerate(lengths[1:], start=1))
    config = tiny({**KINDS, **BLOCK, "data.stage": (*stages, MixtureStage()), "training.sequence_length": lengths[0]})
    counter = CompileCounter()
    torch.compiler.reset()
    with new_training(config), mock.patch.object(torch, "compile", functools.partial(torch.compile, backend=counter)):
        _, (model,) = build(config)
        for length in lengths:
            tokens = torch.zeros(1, length, dtype=torch.int64)
            for has_gradients in (True, False):
                with torch.set_grad_enabled(has_gradients):
                    model(tokens, torch.arange(length).unsqueeze(0))
        texts = [[1] * length for length in range(4, 14)]  # of a task
        assert len(TextRanks([model], config, torch.device("cpu")).rate(texts, [1] * len(texts), 96)) == len(texts)
    torch.compiler.reset()
    return counter.frame_count


def check_compiled(settings: Settings, backend: str = TRACED, cache: str = "") -> int:
    """Parity with one plain process, in whole graphs; returns how many there were."""
    trained, graphs, breaks = run(train_compiled, world_size(tiny(settings)), settings, backend, cache)[0]
    compare(trained, reference(settings))
    assert graphs > 0
    assert breaks == 0
    return graphs


GPT: Settings = {"model.family": "gpt", "model.kv_heads": 0, "data.document_mask": True, "training.loss_chunk": 12}
FUSED: Settings = {**TWO, **BLOCK, "parallel.tp": 2, "model.attention": "sdpa"}
EXPERTS: Settings = {
    **BLOCK,
    **{"model.layers": 3, "model.dense_layers": 1},
    **{"model.experts": 8, "model.top_k": 2, "model.expert_ffn": 32, "model.shared_experts": 1},
    **{"model.balance_loss": "sequence", "model.balance_weight": 0.3},
}
EP2: Settings = {**FSDP2, "parallel.ep": 2}
KINDS: Settings = {
    "model.pattern": ("local", "mid", "full"),
    "model.kinds": Kinds(local={"window": 7, "rotary_fraction": 0.0}, mid={"window": 12, "rope_theta": 500.0}, full={}),
    "model.layers": 4,
    "data.document_mask": True,
}
OTHER_SHAPES: Settings = {
    **{"model.pattern": ("few", "sparse"), "model.experts": 4, "model.layers": 4, "parallel.dp_shard": 2},
    "model.kinds": Kinds(few={"heads": 4, "kv_heads": 2, "ffn": 40, "experts": 0, "attention": "eager"}, sparse={}),
}
AFTER: Settings = {"model.norm_position": "after", "model.qk_norm": "width", "model.layers": 4}
PARTS = 7
"""graphs of a model with experts: of a dense block; of the others' attention, gating (of the experts and of the shared
one, whose tensors have another number of dimensions), weighted sum, and router and its statistics"""
LAYOUTS: dict[str, tuple[Settings, int]] = {
    "block, sp": ({**TWO, **BLOCK, **SP2}, 1),
    "norm and loss, fsdp": ({**TWO, **NORM, **LOSS, **FSDP2}, 0),
}
"""and how many graphs there are; 0: any number"""
AT_NIGHT: dict[str, tuple[Settings, int]] = {
    "experts": ({**EXPERTS, **EP2}, PARTS),
    "all scopes": ({**TWO, **NORM, **BLOCK, **LOSS, **FSDP2, **SP2}, 0),
    "norms of queries and keys": ({**TWO, **NORM, **BLOCK, "parallel.tp": 2, "model.qk_norm": "width"}, 0),
    "low-rank updates": ({**TWO, **BLOCK, **SP2, "lora.rank": 3, "lora.alpha": 12.0}, 0),
    "gpt with documents and chunks": ({**TWO, **BLOCK, **LOSS, **SP2, **GPT}, 0),
    "full, fsdp": ({**TWO, **BLOCK, **FSDP2, "recompute.mode": "full"}, 0),
    "ffn, fsdp": ({**TWO, **BLOCK, **FSDP2, "recompute.mode": "ffn"}, 0),
    # what is recomputed is in the graph, on a CPU as well: full recomputes plain attention, selective none
    "full, sp": ({**TWO, **BLOCK, **SP2, "recompute.mode": "full", "model.attention": "eager"}, 0),
    "selective, sp": ({**TWO, **BLOCK, **SP2, "recompute.mode": "selective"}, 0),
    "selective_half, sp": ({**TWO, **BLOCK, **SP2, "recompute.mode": "selective_half"}, 0),
    "every_k, fused": ({**FUSED, "recompute.mode": "every_k"}, 0),
    "full, fused": ({**FUSED, "recompute.mode": "full"}, 0),
    "kinds, fsdp": ({**BLOCK, **FSDP2, **KINDS}, 3),
    "kinds of other shapes, fsdp": ({**BLOCK, **OTHER_SHAPES}, 0),
    "experts, sp": ({**EXPERTS, **SP2, "parallel.ep": 2}, PARTS),
    "experts, pipeline, norms after attention": ({**EXPERTS, **EP2, **AFTER, "parallel.pp": 2}, 0),
}
for mode in ("full", "segment", "ffn", "selective", "selective_half"):
    AT_NIGHT[f"experts, {mode}"] = ({**EXPERTS, **EP2, "recompute.mode": mode}, PARTS)


@pytest.mark.parametrize("name", [*LAYOUTS, *(pytest.param(name, marks=exhaustive) for name in AT_NIGHT)])
def test_a_compiled_layout_trains_the_same_model_in_whole_graphs(name: str) -> None:
    """One compilation serves all blocks, and no gradient is lost where a tensor is in flight between graphs.

    Routers count the tokens of each expert once.
    """
    settings, graphs = {**LAYOUTS, **AT_NIGHT}[name]
    assert check_compiled(settings) in ([graphs] if graphs else range(1, 100))


@pytest.mark.exhaustive
def test_every_kind_of_block_is_compiled_for_every_length() -> None:
    """Torch's own limit of graphs is eight."""
    lengths = (8, 16, 24)
    assert run(graphs_of_blocks, 1, lengths) == [3 * 2 * len(lengths)]


@exhaustive
@pytest.mark.skipif(torch.__version__ < (2, 12), reason="torch 2.11 does not lose it; 2.13 and 2.15 do")
def test_torchs_own_embedding_would_lose_its_gradient() -> None:
    """Why there is `VocabParallelEmbedding`: a compiled block takes a tensor in flight as if nothing came before it."""
    settings = {**TWO, **BLOCK, **SP2}
    trained, *_ = run(train_compiled, 2, settings, TRACED, "", torchs_embedding)[0]
    with pytest.raises(AssertionError, match=r"step 1, embed_tokens.weight: gradient differs"):
        compare(trained, reference(settings))


def train_with_recomputation_inside(settings: Settings) -> None:
    with mock.patch.object(torchllm.parallel.compile, "must_recompute_outside", return_value=False):
        train_compiled(settings, TRACED)


@exhaustive
@pytest.mark.skipif(not (2, 13) <= torch.__version__ < (2, 14), reason="of 2.11, 2.13, 2.15 only 2.13 fails")
def test_torch_still_fails_at_recomputed_fused_attention_under_tensor_parallelism() -> None:
    """If this fails, or only torch 2.15 is supported, `must_recompute_outside` can be removed."""
    with pytest.raises(WorkerFailed, match="expected all tensors_saved_with_vc_check to be Tensors"):
        run(train_with_recomputation_inside, 2, {**FUSED, "recompute.mode": "full"})


@exhaustive
@pytest.mark.parametrize("model", [{"model.layers": 1}, {**EXPERTS, "parallel.ep": 2, "model.dense_layers": 0}])
def test_the_real_backend(model: Settings, tmp_path: Path) -> None:
    """FSDP stays out of the graphs, so what it compiles behind tensor parallelism is all that there is."""
    check_compiled({**NORM, **BLOCK, **LOSS, **SP2, **model}, "inductor", str(tmp_path))  # one cache for both ranks
