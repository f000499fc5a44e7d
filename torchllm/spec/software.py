"""What a training framework does that its layout does not say, and the six constants it is fitted by. No torch.

Facts are read from its source or paper. Constants are the same for every model, sequence length and number of GPUs;
what belongs to a GPU or a network is in `train_configs/clusters/*.toml`, shared by all frameworks that run on it.
"""

from dataclasses import dataclass
from typing import Literal

AttentionKernel = Literal["eager", "fused_softmax", "flash1", "flash2", "flash3"]
"""attention kernels: matrices of scores in memory; the same with scale, mask and softmax in one kernel; FlashAttention
1 and 2; cuDNN's or FlashAttention 3"""


@dataclass(frozen=True)
class Constants:
    """What is fitted, at most six, each with its unit."""

    launch: float = 5e-6
    """seconds between two kernels, and of their start and end, in which a GPU computes next to nothing"""
    traffic: float = 1.2
    """bytes that elementwise kernels move over those that the formulas count"""
    exposed: float = 0.5
    """share of what could be hidden behind compute that is not: gathers, reductions (1: nothing overlaps)"""
    wait: float = 2e-5
    """seconds that a collective of tensor parallelism waits for its slowest rank, and a pipeline stage for the next"""
    flush: float = 0.5
    """micro batches whose time a pipeline loses in a step beyond its bubble"""
    allocator: float = 1.17
    """memory reserved over memory in use, of what comes and goes within a step"""


UNITS = {"launch": "s", "traffic": "x", "exposed": "x", "wait": "s", "flush": "micro batches", "allocator": "x"}
"""of the constants"""


@dataclass(frozen=True)
class Software:
    """One framework. Sizes in bytes a parameter or element."""

    name: str = "torchllm"
    weights: float = 2.0
    """working copy of a weight, where there is one beside the states"""
    gradients: float = 4.0
    """gradient as it is kept and reduced"""
    gathered: float = 2.0
    """a weight as it is sent to be gathered"""
    states: float = 12.0
    """master weight and moments"""
    reserve: float = 2.0e9
    """bytes of a device that no tensor and no allocator has: CUDA context, NCCL's buffers, libraries"""
    peaks_allocated: bool = False
    """its measured peaks are of what tensors hold; False: of what the allocator has reserved"""
    fsdp: bool = True
    """weights are float32 shards, gathered in 16 bits; False: a 16-bit copy beside the states"""
    temporary_gradients: float = 2.0
    """a weight's gradient of one micro batch, until it is added to the step's"""
    gradient_copies: float = 0.0
    """of all gradients, to send them: buckets, flat buffers; 0 where they are sent from where they are"""
    kept_logits: float = 4.0
    """of a token and row of the vocabulary, from the loss's forward to its backward"""
    logits_forward: float = 10.0
    """and at the peak of its forward: 16 bits, float32, and their shifted or normalised selves"""
    logits_backward: float = 12.0
    """and of its backward"""
    keeps_gathered: bool = True
    """with sequence parallelism, what a product reads is kept as it was gathered; False: it is gathered again"""
    fused_scores: float = 2.0
    """bytes of a score that a fused softmax keeps: its result"""
    eager_scores: float = 6.0
    """bytes of a score that a plain softmax keeps: float32, and 16 bits for the product with the values"""
    vocab_parallel: bool = True
    """tp shares the head and the logits"""
    whole_logits: bool = False
    """the logits of all tp ranks are gathered, and each computes the loss of all of them"""
    recomputes_attention_only: bool = False
    """recompute.mode selective is attention's core (Korthikanti et al.), not all but products and attention"""
    keeps_every_other: bool = False
    """recompute.mode selective keeps every other product, not all"""
    recomputes_whole_blocks: bool = True
    """the last product of a recomputed block is computed again too"""
    dropout: bool = False
    """three dropouts a block, whose masks are kept"""
    fused_elementwise: bool = False
    """bias, activation, dropout and residual in one kernel each"""
    one_card: bool = False
    """gathers of sharded weights go over one network card of a node, not over all"""
    overlaps_tensor_parallel: bool = False
    """tensor parallelism's collectives of the backward run beside the gradients of the weights"""
    overlaps_reduction: bool = False
    """gradients are reduced while the last backward computes"""
    attention: AttentionKernel = "flash2"
    """where a measurement does not say"""
    fused_norm: bool = False
    """RMSNorm in one kernel, where a measurement does not say"""
    default_sequence_parallel: bool = False
    """where a measurement does not say"""
    default_zero_stage: int = 3
    """where a measurement does not say"""
    default_vocab: int = 51200
    """where a measurement does not say: GPT-2's, made divisible"""
    constants: Constants = Constants()
