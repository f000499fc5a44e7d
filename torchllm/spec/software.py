"""What a training framework does that a layout does not say, and the six constants that are fitted. No torch.

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
    """The constants that `recipes/plan.py calibrate` fits to measurements, each with its unit."""

    launch: float = 5e-6
    """seconds that each kernel adds to its computation: the gap before it, its start and its end"""
    traffic: float = 1.2
    """bytes that elementwise kernels move, divided by the bytes that the formulas count"""
    exposed: float = 0.5
    """share of the gathers and reductions that could overlap with computation but does not (1: nothing overlaps)"""
    wait: float = 2e-5
    """seconds that a collective of tensor parallelism waits for its slowest rank, and a pipeline stage for the next"""
    flush: float = 0.5
    """time that a pipeline loses in a step beyond its bubble, in micro batches"""
    allocator: float = 1.17
    """bytes reserved divided by bytes in use, for tensors that are allocated and freed within a step"""


UNITS = {"launch": "s", "traffic": "x", "exposed": "x", "wait": "s", "flush": "micro batches", "allocator": "x"}
"""unit of each constant; x: a ratio"""


@dataclass(frozen=True)
class Software:
    """One training framework. Sizes are in bytes per parameter or per element unless they say otherwise."""

    name: str = "torchllm"
    weights: float = 2.0
    """working copy of a weight, if there is one beside the states"""
    gradients: float = 4.0
    """a gradient, as it is stored and reduced"""
    gathered: float = 2.0
    """a weight, as it is sent in an all-gather"""
    states: float = 12.0
    """master weight and moments"""
    shards: float = 4.0
    """of `states`, a weight's shard (fsdp)"""
    trained: float = 1.0
    """share of the parameters that are trained; less than 1: LoRA, and sizes are means over all parameters"""
    reserve: float = 2.0e9
    """bytes per device outside the allocator: CUDA context, NCCL's buffers, libraries"""
    peaks_allocated: bool = False
    """True: its measured peaks are bytes that tensors hold; False: bytes that the allocator has reserved"""
    fsdp: bool = True
    """True: weights are float32 shards, gathered in 16 bits; False: a 16-bit copy is stored beside the states"""
    temporary_gradients: float = 2.0
    """a weight's gradient of one micro batch, until it is added to the step's"""
    gradient_copies: float = 0.0
    """buffers from which gradients are sent (buckets, flat buffers); 0: they are sent in place"""
    kept_logits: float = 4.0
    """bytes per logit from the forward of the loss to its backward"""
    logits_forward: float = 10.0
    """bytes per logit at the peak of that forward: 16 bits, float32, and shifted or normalized copies"""
    logits_backward: float = 12.0
    """bytes per logit at the peak of that backward"""
    keeps_gathered: bool = True
    """True: with sequence parallelism, gathered inputs are stored for the backward; False: they are gathered again"""
    fused_scores: float = 2.0
    """bytes per score that a fused softmax stores: its result"""
    eager_scores: float = 6.0
    """bytes per score that a plain softmax stores: float32, and 16 bits for the product with the values"""
    vocab_parallel: bool = True
    """True: the head and the logits are sharded over tp"""
    whole_logits: bool = False
    """True: the logits of all tp ranks are gathered, and each rank computes the loss of all of them"""
    recomputes_attention_only: bool = False
    """True: recompute.mode selective recomputes the core of attention (Korthikanti et al. 2022, arXiv 2205.05198);
    False: everything except matrix products and attention"""
    keeps_every_other: bool = False
    """True: recompute.mode selective stores every second matrix product; False: all of them"""
    saves_collectives: bool = False
    """True: recompute.mode selective also stores what collectives of tensor and context parallelism return"""
    recomputes_whole_blocks: bool = True
    """True: the last product of a recomputed block is computed again too"""
    dropout: bool = False
    """True: each block has three dropouts, whose masks are stored"""
    fused_elementwise: bool = False
    """True: bias, activation, dropout and residual are fused into one kernel each"""
    one_card: bool = False
    """True: gathers of sharded weights use one network card per node; False: all cards"""
    overlaps_tensor_parallel: bool = False
    """True: tensor parallelism's collectives in the backward overlap with the gradients of the weights"""
    overlaps_reduction: bool = False
    """True: gradients are reduced while the last backward computes"""
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
