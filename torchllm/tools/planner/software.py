"""Properties of training frameworks that a layout does not say, and the fitted constants. No torch.

torchllm's are `TORCHLLM`; other frameworks, for comparison, are in evidence/stacks.py of a checkout.
Constants are the same for every framework, model, sequence length and number of GPUs; constants of a GPU or a network
are in `train_configs/clusters/*.toml`, shared by all frameworks on it.
"""

from dataclasses import dataclass, replace
from typing import Literal

from torchllm.config import Parallel, Recompute

AttentionKernel = Literal["eager", "fused_softmax", "flash1", "flash2", "flash3"]
"""attention kernels: matrices of scores in memory; the same with scale, mask and softmax in one kernel; FlashAttention
1 and 2; cuDNN's or FlashAttention 3"""


@dataclass(frozen=True)
class Constants:
    """Constants that no data sheet has. All frameworks share them, except for the speed and the allocator.

    `python -m evidence fit FOLDER` fits them jointly to published measurements; `recipes/plan.py calibrate` fits those
    in `calibration.fit.OF_A_MACHINE` to a few runs on one machine.
    """

    launch: float = 8.5e-6
    """seconds that each kernel adds to its computation: the gap before it, its start and its end"""
    host: float = 7.7e-5
    """seconds that the host needs to start a kernel: with small ones the device waits for it"""
    traffic: float = 1.24
    """bytes that elementwise kernels move, divided by the bytes that the formulas count"""
    exposed: float = 0.38
    """share of the gathers and reductions that could overlap with computation but does not (1: nothing overlaps)"""
    wait: float = 1.6e-4
    """seconds that a collective of tensor parallelism adds to its bytes and hops: its ramp, the slowest rank"""
    message: float = 6e-5
    """seconds that a pipeline stage waits, beyond the transfer, for each message of the previous stage"""
    fall: float = 0.04
    """exponent of the fall of the collectives' bandwidth with their number of nodes, beyond two"""
    speed: float = 1.0
    """rate of a framework's kernels over that which the formulas expect"""
    allocator: float = 1.17
    """bytes reserved divided by bytes in use, for tensors that are allocated and freed within a step"""


@dataclass(frozen=True)
class Software:
    """One training framework. Sizes are in bytes per parameter or per element unless they say otherwise."""

    name: str = "torchllm"
    weights: float = 2.0
    """working copy of a weight, if there is one in addition to the states"""
    gradients: float = 4.0
    """a gradient, as it is stored and reduced"""
    reduced: float = 0.0
    """a gradient, as it is sent in a reduction; 0: as it is stored"""
    kept: float = 0.0
    """a gradient's shard, after its reduction (fsdp); 0: as it is stored"""
    all_reduces: bool = False
    """True: under ZeRO 1 every rank gets all gradients; False: the gradients of its shard"""
    gathered: float = 2.0
    """a weight, as it is sent in an all-gather"""
    states: float = 12.0
    """master weight and moments"""
    rounding: float = 0.0
    """moved by a step to round moments and weights"""
    shards: float = 4.0
    """of `states`, a weight's shard (fsdp)"""
    trained: float = 1.0
    """trained share of the parameters; less than 1: only updates are trained; sizes are means over all parameters"""
    reserve: float = 2.0e9
    """bytes per device outside the allocator: CUDA context, NCCL's buffers, libraries"""
    peaks_allocated: bool = False
    """True: its measured peaks are bytes that tensors hold; False: bytes that the allocator has reserved"""
    fsdp: bool = True
    """True: weights are float32 shards, gathered in 16 bits; False: a 16-bit copy is stored as well as the states"""
    temporary_gradients: float = 2.0
    """a weight's gradient of one micro batch, until it is added to the step's"""
    gradient_copies: float = 0.0
    """send buffers of gradients (buckets, flat buffers); 0: they are sent in place"""
    kept_logits: float = 4.0
    """bytes per logit from the forward of the loss to its backward"""
    logits_forward: float = 10.0
    """bytes per logit at the peak of that forward: 16 bits, float32, and shifted or normalized copies"""
    logits_backward: float = 12.0
    """bytes per logit at the peak of that backward"""
    takes_softmax_again: bool = False
    """True: a loss whose logits tp cuts keeps them in 16 bits"""
    loss_forward: float = 14.0
    """bytes per logit that the forward of the loss moves: to float32 (6), its log-softmax (8)"""
    loss_backward: float = 14.0
    """bytes per logit that its backward moves: the gradient of the log-softmax (8), to 16 bits (6)"""
    keeps_gathered: bool = True
    """True: with sequence parallelism, gathered inputs are stored for the backward; False: they are gathered again"""
    regathers: bool = False
    """parallel.regather; with a selective recomputation `keeps_gathered` stays: recomputed inputs are whole"""
    fused_scores: float = 2.0
    """bytes per score that a fused softmax stores: its result"""
    eager_scores: float = 6.0
    """bytes per score that a plain softmax stores: float32, and 16 bits for the product with the values"""
    whole_logits: bool = False
    """True: the logits of all tp ranks are gathered, and each rank computes the loss of all of them"""
    recomputes_attention_only: bool = False
    """True: recompute.mode selective recomputes the core of attention (Korthikanti et al. 2022, arXiv 2205.05198);
    False: everything except matrix products and attention"""
    keeps_every_other: bool = False
    """True: recompute.mode selective stores every second matrix product; False: all of them"""
    saves_collectives: bool = False
    """True: recompute.mode selective also stores the results of collectives of tensor and context parallelism"""
    dropout: bool = False
    """True: each block has three dropouts, whose masks are stored"""
    fused_elementwise: bool = False
    """True: bias, activation, dropout and residual are fused into one kernel each"""
    fuses_permutations: bool = False
    """True: separate kernels put the rows of experts in order, and add them up"""
    ring_gradients: float = 4.0
    """a gradient of keys and values, as it goes round a ring"""
    sends_tokens_once: bool = False
    """True: a token goes to another node, and to another rank, once, however many of its experts are there (DeepEP,
    HybridEP); False: once per expert"""
    plain_norm: tuple[float, float] = (36.0, 76.0)
    """bytes per element that an RMSNorm of single float32 operations moves, forward and backward: to float32 (6),
    square (8), mean (4), product (8), to 16 bits (6), times the weight (4), and the gradients of these"""
    gate_apart: bool = False
    """True: without sequence parallelism, the gradients of a gate's and of its neighbor's input are reduced apart"""
    one_card: bool = False
    """True: gathers of sharded weights use one network card per node; False: all cards"""
    overlaps_tensor_parallel: bool = False
    """True: tensor parallelism's collectives in the backward overlap with the gradients of the weights"""
    overlaps_products: bool = False
    """True: the collectives of both passes also overlap with their products, which are computed in pieces
    (Transformer Engine's userbuffers, torch's asynchronous tensor parallelism)"""
    waits_for_sends: bool = False
    """True: a pipeline stage waits until its message has arrived; False: it goes on computing"""
    overlaps_reduction: bool = False
    """True: gradients are reduced while the last backward computes"""
    overlaps_gather: bool = False
    """True: under ZeRO 1 and 2 weights are gathered while the first forward computes"""
    attention: AttentionKernel = "flash2"
    """kernel, if a measurement does not say"""
    fused_norm: bool = False
    """whether RMSNorm is one kernel, if a measurement does not say"""
    default_sequence_parallel: bool = False
    """whether sequences are split over tp, if a measurement does not say"""
    default_zero_stage: int = 3
    """ZeRO stage, if a measurement does not say"""
    default_vocab: int = 51200
    """rows of the embedding, if a measurement does not say: GPT-2's, made divisible"""
    constants: Constants = Constants()

    def summed_gradients(self, zero: int, dp_replicate: int) -> float:
        """Return the bytes of a gradient that is summed over micro batches: as it is kept, if it is reduced by then."""
        return self.kept or self.gradients if zero >= 2 and dp_replicate == 1 else self.gradients

    def under(self, parallel: Parallel, recompute: Recompute) -> "Software":
        """Return the framework as it is in a layout with parallel.regather; no other key changes it."""
        if not parallel.regather or recompute.mode in ("full", "segment"):
            return self
        is_selective = recompute.mode in ("selective", "selective_half")
        return replace(self, keeps_gathered=is_selective, regathers=True)

    @property
    def sent_gradients(self) -> float:
        """Bytes of a gradient in a reduction."""
        return self.reduced or self.gradients


TORCHLLM = Software(overlaps_reduction=True, saves_collectives=True, takes_softmax_again=True)
"""this repository"""
