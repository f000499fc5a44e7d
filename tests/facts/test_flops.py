import re
from dataclasses import replace

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from torchllm.config import Config, Kinds, Model, Parallel, Recompute
from torchllm.config.schema import TrainedParameters
from torchllm.facts.device_peaks import DEVICE_PEAKS, device_peak_flops
from torchllm.facts.flops import (
    ALL_TRAINED,
    active_parameter_count,
    block_flops,
    flops_per_token,
    half_of_products,
    head_size,
    parameter_count,
    recomputed_flops,
    recomputed_flops_per_token,
    trained_parameter_count,
)
from torchllm.models.decoder import build_model
from torchllm.parallel.recompute import apply_recompute

LLAMA = Model(layers=40, hidden=5120, heads=40, ffn=13_824, vocab=128_000)  # Hagemann et al., 13B
PALM = Model(
    layers=118, hidden=18_432, heads=48, kv_heads=1, head_dim=256, ffn=73_728, vocab=256_000, tied_embeddings=True
)
SMALL = {
    "llama": Model(layers=5, hidden=24, heads=6, kv_heads=2, head_dim=8, ffn=40, vocab=33, attention="eager"),
    "gpt": Model(family="gpt", layers=5, hidden=24, heads=4, ffn=40, vocab=33, tied_embeddings=True, attention="eager"),
}
SMALL["norms after"] = replace(SMALL["llama"], norm_position="after", qk_norm="width", qkv_bias=True)
SMALL["norms on both sides, gates"] = replace(SMALL["llama"], norm_position="both", attention_gate="head")
SMALL["experts"] = replace(SMALL["llama"], experts=6, top_k=2, expert_ffn=16, dense_layers=2)
SMALL["shared experts"] = replace(SMALL["experts"], top_k=3, shared_experts=2, dense_layers=1)
SMALL["shared experts with a gate"] = replace(SMALL["shared experts"], shared_gate=True)
SMALL["kinds"] = replace(
    SMALL["experts"], pattern=("a", "b"), kinds=Kinds(a={"rotary_fraction": 0.0}, b={"rope_theta": 5.0})
)
SMALL["other shapes"] = replace(
    SMALL["shared experts"],
    pattern=("few", "after", "wide"),
    kinds=Kinds(
        few={"heads": 2, "head_dim": 12, "qk_norm": "head", "experts": 0, "ffn": 56},
        after={"norm_position": "after", "qkv_bias": True, "experts": 0},
        wide={"kv_heads": 6, "expert_ffn": 24},
    ),
)
SMALL["keys as values"] = replace(
    SMALL["llama"],
    v_norm=True,
    pattern=("a", "b"),
    kinds=Kinds(a={}, b={"head_dim": 12, "kv_heads": 3, "keys_as_values": True}),
)
SMALL["gate per element"] = replace(SMALL["gpt"], attention_gate="element")
SMALL["experts, norms after"] = replace(SMALL["shared experts"], norm_position="after", dense_layers=0)
SMALL["multi-token prediction"] = replace(SMALL["llama"], mtp_depth=2)
RECOMPUTES = [
    Recompute(),
    Recompute("full"),
    Recompute("segment"),
    Recompute("segment", 3),
    Recompute("every_k"),
    Recompute("every_k", 3),
    Recompute("ffn"),
    Recompute("selective_half"),
    Recompute("selective"),
]


def forward_flops_per_token(model: Model, sequence_length: int) -> int:
    """Return the FLOPs of one token's forward pass as it runs, attention unmasked but for a window."""
    blocks = sum(block_flops(model, layer, sequence_length) for layer in range(model.blocks))
    return blocks + 2 * model.predictions * head_size(model)


def executed_flops_per_token(model: Model, recompute: Recompute, sequence_length: int) -> int:
    """Return the FLOPs that a training step runs: forward, backward and recomputation; attention unmasked."""
    recomputed = recomputed_flops_per_token(model, recompute, sequence_length)
    return 3 * forward_flops_per_token(model, sequence_length) + recomputed


@pytest.mark.quick
def test_model_flops_give_palms_published_utilization() -> None:
    """arXiv 2204.02311, table 1 and appendix B: 540.35 B parameters; 238.3 K tokens/s on 6144 TPU v4 are 46.2 %."""
    assert parameter_count(PALM) / 1e9 == pytest.approx(540.35, abs=0.01)  # PaLM has one norm a block, not two
    rate = 238.3e3 * flops_per_token(PALM, 2048)
    assert rate / (6144 * 275e12) == pytest.approx(0.462, abs=5e-4)


@pytest.mark.quick
@pytest.mark.parametrize(
    ("model", "gpus", "seconds", "percent"),
    [
        (LLAMA, 64, 26.54, 70.5),
        (Model(layers=80, hidden=8192, heads=64, ffn=22_016, vocab=128_000), 128, 79.31, 55.3),
    ],
)
def test_model_flops_give_hagemanns_published_utilization(
    model: Model, gpus: int, seconds: float, percent: float
) -> None:
    """arXiv 2311.05610: steps of 2048 sequences of 2048 tokens on A100."""
    peak = device_peak_flops("NVIDIA A100-SXM4-80GB", "bfloat16")
    assert peak is not None
    mfu = 2048 * 2048 / seconds * flops_per_token(model, 2048) / (gpus * peak)
    assert mfu * 100 == pytest.approx(percent, abs=0.05)  # printed to a tenth


@pytest.mark.quick
def test_causal_attention_is_half_of_palms() -> None:
    length = 4096
    matrices = 6 * parameter_count(LLAMA)
    whole, half = flops_per_token(LLAMA, length), flops_per_token(LLAMA, length, pairs=(length + 1) / 2)
    assert (half - matrices) / (whole - matrices) == (length + 1) / (2 * length)


@pytest.mark.quick
def test_what_a_forks_block_adds_has_a_backward_pass_too(monkeypatch: pytest.MonkeyPatch) -> None:
    model = Model()
    without = flops_per_token(model, 64)
    monkeypatch.setattr("torchllm.facts.flops.added_flops", lambda model, sequence_length: 7)
    assert flops_per_token(model, 64) - without == 3 * model.layers * 7


def test_attention_in_windows_is_counted_as_windows() -> None:
    """By MFU, by HFU and by what balances the stages of a pipeline."""
    windowed = replace(LLAMA, window=1024)
    assert flops_per_token(windowed, 4096) == flops_per_token(LLAMA, 1024)
    assert flops_per_token(windowed, 512) == flops_per_token(LLAMA, 512)
    full = Recompute("full")
    assert recomputed_flops_per_token(windowed, full, 4096) == recomputed_flops_per_token(LLAMA, full, 1024)
    assert block_flops(windowed, 0, 4096) == block_flops(LLAMA, 0, 1024)


def test_each_block_is_counted_with_the_window_of_its_kind() -> None:
    """By MFU, by HFU and by what balances the stages of a pipeline."""
    windows = [1024, 1024, 0, 512] * 10
    kinds = Kinds(wide={"window": 1024}, full={}, narrow={"window": 512})
    model = replace(LLAMA, pattern=("wide", "wide", "full", "narrow"), kinds=kinds)
    alike = {window: replace(LLAMA, window=window) for window in set(windows)}
    for length in (256, 768, 4096):
        of_all = sum(flops_per_token(alike[window], length) for window in windows) / 40
        assert flops_per_token(model, length) == pytest.approx(of_all, rel=1e-12)
        for index, window in enumerate(windows):
            assert block_flops(model, index, length) == block_flops(alike[window], 0, length), index
        for recompute, blocks in ((Recompute("full"), windows), (Recompute("every_k", 3), windows[::3])):
            again = sum(recomputed_flops_per_token(alike[window], Recompute("full"), length) for window in blocks) / 40
            assert recomputed_flops_per_token(model, recompute, length) == pytest.approx(again, rel=1e-12)
    assert flops_per_token(model, 4096, pairs=700.0) == flops_per_token(LLAMA, 4096, pairs=700.0)
    assert parameter_count(model) == parameter_count(LLAMA)


@pytest.mark.parametrize("others", [False, pytest.param(True, marks=pytest.mark.exhaustive)])
def test_executed_flops_are_what_torch_counts(others: bool) -> None:
    """By default each model with a fourth of the modes of recomputation, and each mode with a fourth of the models."""
    for index, model in enumerate(SMALL.values()):
        for number, recompute in enumerate(RECOMPUTES):
            if (index + number) % 4 == 0 or others:
                check_executed_flops(model, recompute, chunk=0)
        if index % 4 == 0 or others:
            check_executed_flops(model, Recompute("full"), chunk=8)


def check_executed_flops(model: Model, recompute: Recompute, chunk: int) -> None:
    """Compare the counts of a step with torch's. chunk: rows of logits at a time; 0: all."""
    batch, length = 2, 16
    torch.manual_seed(0)
    decoder = build_model(model)
    for parameter in decoder.parameters():
        torch.nn.init.normal_(parameter, std=0.02)
    assert decoder.lm_head is not None
    decoder.lm_head.chunk = chunk
    apply_recompute(decoder, recompute, model.layers)
    tokens = torch.randint(model.vocab, (batch, length))
    positions = torch.arange(length).expand(batch, length)
    ahead = torch.randint(model.vocab, (batch, 2, model.mtp_depth, length)) if model.mtp_depth else None
    with FlopCounterMode(display=False) as forward:
        loss = decoder(tokens, positions, None, tokens, 0, ahead)
    with FlopCounterMode(display=False) as backward:
        loss.backward()
    in_forward = forward_flops_per_token(model, length)
    if chunk:  # with the gradients of the logits
        in_forward += 2 * 2 * model.predictions * head_size(model)
    assert forward.get_total_flops() == batch * length * in_forward, (model, recompute, chunk)
    total = forward.get_total_flops() + backward.get_total_flops()
    assert total == batch * length * executed_flops_per_token(model, recompute, length), (model, recompute, chunk)


@pytest.mark.quick
def test_sums_over_tp_are_not_computed_again() -> None:
    """They count as every second product in a compiled block alone: q, k, v, gate of heads, o, and gate, up, down."""
    model = SMALL["norms on both sides, gates"]
    q, kv, ffn = 24 * 48, 24 * 16, 24 * 40
    assert half_of_products(model) == q + kv + q + ffn
    assert half_of_products(model, tp=2) == q + kv + ffn
    assert half_of_products(replace(model, attention_gate="none"), tp=2) == q + kv + ffn
    assert half_of_products(model, tp=2, is_compiled=True) == q + kv + ffn
    assert half_of_products(SMALL["gpt"], tp=2) == 24 * 24 * 2  # q, v of q, k, v, up
    assert half_of_products(SMALL["gpt"], tp=2, is_compiled=True) == 24 * 24 * 2 + ffn  # q, v, up of q, k, v, o, up
    experts = replace(SMALL["experts"], dense_layers=0)  # q, v, gate, down of q, k, v, router, gate, up, down
    assert half_of_products(experts, tp=2) == q + kv + 2 * 2 * 24 * 16
    config = Config(model=model, recompute=Recompute("selective_half"), parallel=Parallel(tp=2))
    assert recomputed_flops(config, 64) == model.layers * 2 * (q + kv + ffn)


@pytest.mark.quick
def test_experts_count_as_often_as_a_token_uses_them() -> None:
    model = SMALL["experts"]
    alone = replace(model, experts=model.top_k)  # a router of fewer rows
    routers = 3 * model.hidden * (model.experts - model.top_k)
    assert active_parameter_count(model) == parameter_count(alone) + routers
    assert active_parameter_count(alone) == parameter_count(alone)
    assert active_parameter_count(LLAMA) == parameter_count(LLAMA)
    attention = 12 * model.layers * model.heads * model.head_width * 64
    assert flops_per_token(model, 64) == 6 * active_parameter_count(model) + attention


@pytest.mark.quick
def test_logits_that_are_computed_again_count() -> None:
    assert recomputed_flops_per_token(SMALL["llama"], Recompute(), 16, has_logits_again=True) == 2 * 33 * 24


TERAFLOPS = {
    312: ("NVIDIA A100-SXM4-80GB", "A100-SXM4-40GB", "NVIDIA A100 80GB PCIe"),
    989.5: ("NVIDIA H100 80GB HBM3", "NVIDIA H200", "NVIDIA GH200 480GB"),
    756.5: ("NVIDIA H100 PCIe",),
    835.5: ("NVIDIA H100 NVL", "NVIDIA H200 NVL"),
    2250: ("NVIDIA B200",),
    2500: ("NVIDIA GB200",),
    125: ("NVIDIA A10",),
    70: ("NVIDIA A10G",),
    362: ("NVIDIA L40S",),
    165.2: ("NVIDIA GeForce RTX 4090",),
}
UNKNOWN = (
    "",
    "Tesla T4",
    "NVIDIA H100",  # sold with several chips under this name
    "NVIDIA H20",
    "NVIDIA H100 80GB HBM3 MIG 1g.10gb",
    "NVIDIA A100-SXM-64GB",
    "NVIDIA A100X",
    "NVIDIA GeForce RTX 4090 D",
    "NVIDIA L40S-24Q",
    "AMD Instinct MI300X",
)


@pytest.mark.quick
def test_peaks_of_devices_by_the_drivers_names() -> None:
    for teraflops, names in TERAFLOPS.items():
        assert [device_peak_flops(name, "bfloat16") for name in names] == [teraflops * 1e12] * len(names)
    for name in UNKNOWN:
        assert device_peak_flops(name, "bfloat16") is None, name
        assert device_peak_flops(name, "tf32") is None, name
    assert device_peak_flops("NVIDIA H100 80GB HBM3", "float8") == 1979e12
    assert device_peak_flops("NVIDIA A100-SXM4-80GB", "float8") is None


@pytest.mark.quick
def test_peaks_are_dense_and_sourced() -> None:
    for peak in DEVICE_PEAKS:
        # Every chip here does bfloat16 at twice TF32; a sparse figure slipped into one column would break that.
        # 2 %: data sheets round to whole TFLOP/s.
        assert peak.bfloat16 == pytest.approx(2 * peak.tf32, rel=0.02)
        assert peak.float8 == 0 or peak.float8 == pytest.approx(2 * peak.bfloat16, rel=0.02)
        assert (peak.float8 == 0) == (re.match("A[1-8]|RTX A6000|RTX 3090", peak.name) is not None)  # Ampere has none
        assert peak.source


@pytest.mark.quick
def test_frozen_weights_need_no_gradients() -> None:
    """Of the operations of a weight a third is its gradient's."""
    updates = TrainedParameters(rank=4, targets=("q_proj", "down_proj"))
    trained = LLAMA.layers * 4 * (LLAMA.heads * LLAMA.head_width + LLAMA.hidden + LLAMA.hidden + LLAMA.ffn)
    assert trained_parameter_count(LLAMA, updates) == trained
    difference = flops_per_token(LLAMA, 64) - flops_per_token(LLAMA, 64, trained=updates)
    assert difference == 2 * parameter_count(LLAMA) - 6 * trained
    assert trained_parameter_count(LLAMA, ALL_TRAINED) == parameter_count(LLAMA)


def test_latent_attention_counts_the_true_width_of_values() -> None:
    """Kernels may take values with zeros behind them; the model's FLOPs do not count these."""
    model = Model(
        **{"mixer": "latent_attention", "layers": 1, "hidden": 32, "heads": 4, "ffn": 40, "latent_q_width": 20},
        **{"latent_kv_width": 12, "nope_head_dim": 10, "rope_head_dim": 6, "v_head_dim": 8},
    )
    projections = 32 * 20 + 20 * 4 * 16 + 32 * (12 + 6) + 12 * 4 * (10 + 8) + 4 * 8 * 32
    scores, results = 4 * 16 * 100, 4 * 8 * 100
    assert block_flops(model, 0, 100) == 2 * (projections + scores + results + 3 * 32 * 40)


@pytest.mark.quick
def test_each_depth_of_multi_token_prediction_is_a_block_a_projection_and_a_head() -> None:
    length, hidden = 64, LLAMA.hidden
    plain, deep = LLAMA, replace(LLAMA, mtp_depth=2)
    more = deep.mtp_depth * (block_flops(LLAMA, 0, length) + 2 * 2 * hidden * hidden + 2 * head_size(LLAMA))
    norms = 6 * deep.mtp_depth * 5 * hidden  # which PaLM counts as parameters: those of a block, and three
    assert flops_per_token(deep, length) - flops_per_token(plain, length) == 3 * more + norms
