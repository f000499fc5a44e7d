"""The parity tests are tested: each of these defects, put in on purpose, must make them fail."""

import contextlib
import re
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import RowwiseParallel

import torchllm.models.experts
import torchllm.models.lora
import torchllm.models.routing_record
import torchllm.optim.expert_balance
import torchllm.optim.grad_norm
import torchllm.parallel.context
import torchllm.parallel.expert
import torchllm.parallel.forward_backward
import torchllm.parallel.initialize
import torchllm.parallel.parallelize
import torchllm.parallel.pipeline
import torchllm.parallel.ring
import torchllm.parallel.tensor
import torchllm.parallel.weight_gradients
import torchllm.train.step
from tests.parity import Settings, Trained, compare, reference, tiny, train, world_size
from tests.workers import run
from torchllm.facts.parameters import canonical_name
from torchllm.models.decoder import Block, Decoder
from torchllm.parallel.attention_kernels import PartialAttention

FSDP2: Settings = {"parallel.dp_shard": 2}
HSDP: Settings = {"parallel.dp_replicate": 2, "parallel.dp_shard": 2}
TP2: Settings = {"parallel.tp": 2}
SP2 = {**TP2, "parallel.sequence_parallel": True}
A_BLOCK = 30_848  # elements
UP = "layers.1.mlp.up_proj.weight"
SMALL: Settings = {"model.layers": 2, "training.micro_batch_size": 2}
"""a defect shows in few blocks and micro batches too"""


@contextlib.contextmanager
def _replaced(target: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    with mock.patch.object(target, name, change(getattr(target, name))):
        yield


def _parameter(stages: Any, canonical: str) -> DTensor:
    return next(p for stage in stages for n, p in stage.named_parameters() if canonical_name(n) == canonical)


def all_reduce_over_replicas_dropped() -> Any:
    """One unit's, of HSDP: the parts of the gradient that other nodes computed are missing."""

    dropped: list[Tensor] = []

    def change(all_reduce: Any) -> Any:
        def skipping(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.shape == (A_BLOCK // 2,) and not dropped:
                dropped.append(tensor)
            else:
                all_reduce(tensor, *args, **kwargs)

        return skipping

    return _replaced(dist, "all_reduce", change)


def reduction_after_a_rowwise_product_dropped() -> Any:
    """Of tensor parallelism: o and down leave each rank its own part of the sum."""

    class Unreduced(RowwiseParallel):
        @staticmethod
        def _prepare_output_fn(layouts: Any, local: Any, module: Any, outputs: DTensor, mesh: Any) -> Tensor:
            return outputs.to_local()

    return _replaced(torchllm.parallel.tensor, "RowwiseParallel", lambda real: Unreduced)


def mean_of_means() -> Any:
    """The loss is divided by the local number of targets times the ranks, right only where all have as many."""

    def change(all_reduce: Any) -> Any:
        def reduce(tensor: Tensor, *args: Any, **kwargs: Any) -> None:
            if tensor.dtype == torch.int64:
                tensor.mul_(dist.get_world_size())
            else:
                all_reduce(tensor, *args, **kwargs)

        return reduce

    return _replaced(torchllm.train.step.dist, "all_reduce", change)


def gradients_averaged_by_fsdp() -> Any:
    """FSDP's own divisor, the number of ranks, on top of the division by the tokens of all ranks."""
    return _replaced(FSDPModule, "set_gradient_divide_factor", lambda real: lambda module, factor: None)


def one_gradient_scaled() -> Any:
    """By a tenth of a thousandth, one parameter of one block."""

    def change(real: Any) -> Any:
        def scaled(self: Any, *args: Any) -> Tensor:
            loss = real(self, *args)
            _parameter(self.stages, UP).grad.mul_(1.0001)
            return loss

        return scaled

    return _replaced(torchllm.parallel.forward_backward.OneStage, "__call__", change)


def norm_gradient_taken_as_whole() -> Any:
    """Of sequence parallelism: the sum over the ranks' tokens is missing."""

    def change(real: Any) -> Any:
        def parallelize(stage: Decoder, mesh: Any, plan: dict[str, Any]) -> Any:
            for name, style in plan.items():
                parent = stage.get_submodule(name.rpartition(".")[0])
                if isinstance(style, torchllm.parallel.tensor.WholeNorm) and isinstance(parent, Decoder | Block):
                    style.gradient = Replicate()
            return real(stage, mesh, plan)

        return parallelize

    return _replaced(torchllm.parallel.tensor, "parallelize_module", change)


def norm_of_the_local_shards() -> Any:
    """The squares are not summed over the ranks."""

    def change(all_reduce: Any) -> Any:
        return lambda tensor, *a, **k: None if tensor.dtype == torch.float64 else all_reduce(tensor, *a, **k)

    return _replaced(torchllm.optim.grad_norm.dist, "all_reduce", change)


def tied_gradients_not_added() -> Any:
    """The first stage's copy has the embedding's, the last one's the head's."""
    return _replaced(torchllm.parallel.pipeline, "add_tied_gradients", lambda real: lambda weights, group: None)


def tied_gradient_counted_by_both_stages() -> Any:
    """In the gradient norm."""
    return _replaced(torchllm.optim.grad_norm, "_is_copy", lambda real: lambda stage, gradient: False)


def a_product_put_off_for_good() -> Any:
    """One weight gradient of one micro batch is never computed."""
    lost: list[Any] = []

    def change(add_product: Any) -> Any:
        def lose_first(product: Any) -> None:
            if lost:
                add_product(product)
            else:
                lost.append(product)

        return lose_first

    return _replaced(torchllm.parallel.weight_gradients, "add_product", change)


def update_gradient_taken_as_whole() -> Any:
    """Of the factors of LoRA that are whole on every tp rank: each rank has the part of its own features."""
    return _replaced(torchllm.parallel.tensor.LowRankUpdate, "gradient_of_whole_factor", lambda real: Replicate())


def scale_forgotten() -> Any:
    """B A x is added to W x, not alpha / rank times that."""
    return _with_scale_of_one(torchllm.models.lora)


def arriving_rows_stay_in_the_order_of_ranks() -> Any:
    """Of expert parallelism: rows from several ranks are not sorted by expert."""

    def change(order_by_expert: Any) -> Any:
        return lambda origins, rows: torch.arange(rows)

    return _replaced(torchllm.parallel.expert, "_order_by_expert", change)


def tokens_counted_again_in_recomputation() -> Any:
    """Each forward pass counts, of which recomputation runs one more."""

    def change(forward: Any) -> Any:
        def counting(ctx: Any, weights: Tensor, logits: Tensor, experts: Tensor, router: Any) -> Tensor:
            router.record(logits, experts)
            result: Tensor = forward(ctx, weights, logits, experts, router)
            return result

        return staticmethod(counting)

    return _replaced(torchllm.models.routing_record.RecordRouting, "forward", change)


def lse_of_the_first_block_kept() -> Any:
    """Output and loss are right, but the backward takes probabilities that do not sum to one."""

    def change(merge: Any) -> Any:
        def merge_without_lse(into: PartialAttention, part: PartialAttention) -> None:
            merge(PartialAttention(into.out, into.lse.clone()), part)

        return merge_without_lse

    return _replaced(torchllm.parallel.ring, "merge", change)


def later_keys_seen() -> Any:
    """Queries see all keys of an earlier rank, those of its late piece too."""

    def change(init: Any) -> Any:
        def init_with_all_keys(self: Any, ring: Any, number: int, length: int) -> None:
            init(self, ring, number, length)
            self.keys = slice(0, length)

        return init_with_all_keys

    return _replaced(torchllm.parallel.ring.RingStep, "__init__", change)


@contextlib.contextmanager
def documents_of_this_rank_for_all() -> Iterator[None]:
    """Every rank takes its own document ids for those of the other ranks."""

    def repeat(x: Tensor, group: dist.ProcessGroup) -> list[Tensor]:
        return [x] * dist.get_world_size(group)

    with (
        mock.patch.object(torchllm.parallel.ring, "gather_from_ranks", repeat),
        mock.patch.object(torchllm.parallel.context, "gather_from_ranks", repeat),
    ):
        yield


def gradient_not_sent_back() -> Any:
    """Ulysses: the gradients of heads stay on the rank that computed them."""
    unsent = staticmethod(lambda ctx, gradient: (gradient, None))
    return mock.patch.object(torchllm.parallel.context._AllToAll, "backward", unsent)


def _with_scale_of_one(module: Any) -> Any:
    return _replaced(module, "add_low_rank_update", lambda real: lambda *args: real(*args[:-1], 1.0))


GRADIENT = "gradient differs by"
PP2: Settings = {"parallel.pp": 2}
TIED: Settings = {"model.tied_embeddings": True}
LORA: Settings = {"lora.rank": 3}
EXPERTS: Settings = {"model.experts": 6, "model.top_k": 2, "model.shared_experts": 1}
BIAS: Settings = {**EXPERTS, "model.router_bias": True, "model.router_bias_rate": 0.01}
TOKENS = "step 1: tokens per expert differ"
EP2: Settings = {**EXPERTS, "parallel.ep": 2}
FOUR_BLOCKS: Settings = {"model.layers": 4}
RING2: Settings = {"parallel.cp": 2}
ULYSSES2: Settings = {**RING2, "parallel.cp_method": "ulysses"}
DOCUMENTS: Settings = {"data.document_mask": True}
UNCLIPPED = {"training.max_grad_norm": 1e9}  # else a wrong norm shows in the next step's gradients
# the mutation, the layout that it is put into, whether the labels are ragged, and which comparison must catch it
MUTATIONS: list[tuple[Callable[[], Any], Settings, bool, str]] = [
    (all_reduce_over_replicas_dropped, HSDP, False, "ranks differ"),
    (reduction_after_a_rowwise_product_dropped, TP2, False, "ranks differ"),
    (mean_of_means, FSDP2, True, f"step 1.*{GRADIENT}"),
    (gradients_averaged_by_fsdp, FSDP2, False, f"step 1.*{GRADIENT}"),
    (one_gradient_scaled, FSDP2, False, f"step 1, {UP}: {GRADIENT}"),
    (norm_gradient_taken_as_whole, SP2, False, "norm.weight: ranks differ"),
    (norm_of_the_local_shards, {**FSDP2, **UNCLIPPED}, False, "gradient norm differs"),
    (tied_gradients_not_added, {**PP2, **TIED}, False, "embed_tokens.weight: ranks differ"),
    (tied_gradient_counted_by_both_stages, {**PP2, **TIED, **UNCLIPPED}, False, "gradient norm differs"),
    (
        a_product_put_off_for_good,
        {**PP2, **FOUR_BLOCKS, "parallel.schedule": "ZBVZeroBubble"},
        False,
        f"step 1.*{GRADIENT}",
    ),
    (
        update_gradient_taken_as_whole,
        {**TP2, **LORA, "lora.targets": ("q_proj",)},
        False,
        "lora_A.weight: ranks differ",
    ),
    (
        update_gradient_taken_as_whole,
        {**SP2, **LORA, "lora.targets": ("o_proj",)},
        False,
        "lora_B.weight: ranks differ",
    ),
    (arriving_rows_stay_in_the_order_of_ranks, {**FSDP2, **EP2}, False, f"step 1.*{GRADIENT}"),
    (tokens_counted_again_in_recomputation, {**FSDP2, **BIAS, "recompute.mode": "full"}, False, TOKENS),
    (scale_forgotten, {**FSDP2, **LORA}, False, f"step 1.*{GRADIENT}"),
    (lse_of_the_first_block_kept, RING2, False, f"step 1.*{GRADIENT}"),
    (later_keys_seen, RING2, False, f"step 1.*{GRADIENT}"),
    (documents_of_this_rank_for_all, {**RING2, **DOCUMENTS}, False, f"step 1.*{GRADIENT}"),
    (documents_of_this_rank_for_all, {**ULYSSES2, **DOCUMENTS}, False, f"step 1.*{GRADIENT}"),
    (gradient_not_sent_back, ULYSSES2, False, f"step 1.*{GRADIENT}"),
]
ONE_PER_TECHNIQUE = (
    mean_of_means,
    reduction_after_a_rowwise_product_dropped,
    norm_gradient_taken_as_whole,
    norm_of_the_local_shards,
    tied_gradients_not_added,
    a_product_put_off_for_good,
    arriving_rows_stay_in_the_order_of_ranks,
    tokens_counted_again_in_recomputation,
    scale_forgotten,
    lse_of_the_first_block_kept,
    gradient_not_sent_back,
)


def parameters() -> list[Any]:
    """Return the index of each mutation; one per technique is in the default tier."""
    cases = []
    for index, (mutation, *_) in enumerate(MUTATIONS):
        marks = [] if mutation in ONE_PER_TECHNIQUE else [pytest.mark.exhaustive]
        cases.append(pytest.param(index, id=f"{mutation.__name__}-{index}", marks=marks))
    return cases


def train_mutated(index: int) -> Trained | None:
    mutation, settings, ragged, _ = MUTATIONS[index]
    with mutation():
        return train({**SMALL, **settings}, ragged)


@pytest.mark.parametrize("index", parameters())
def test_parity_fails_with(index: int) -> None:
    _, settings, ragged, caught_by = MUTATIONS[index]
    settings = {**SMALL, **settings}
    with pytest.raises(AssertionError) as caught:  # by a rank, which sees its peers' copies, or here
        compare(run(train_mutated, world_size(tiny(settings)), index)[0], reference(settings, ragged))
    assert re.search(caught_by, str(caught.value).replace("\n", " ")), caught.value


@pytest.mark.exhaustive
def test_mean_of_means_needs_ragged_labels_to_show() -> None:
    """So the parity tests must have them; and a mutation here does not fail merely because it is one."""
    index = next(i for i, (mutation, *_) in enumerate(MUTATIONS) if mutation is mean_of_means)
    got = run(train_mutated_evenly, 2, index)[0]
    compare(got, reference({**SMALL, **FSDP2}))


def train_mutated_evenly(index: int) -> Trained | None:
    mutation, settings, _, _ = MUTATIONS[index]
    with mutation():
        return train({**SMALL, **settings}, ragged=False)
