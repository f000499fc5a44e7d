import dataclasses
from collections.abc import Sequence

import pytest
import torch

from torchllm.config import Generate, Kinds, Model
from torchllm.config.errors import UserError
from torchllm.models.attention import CORES
from torchllm.models.attention_cores import EagerAttention
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import initialize
from torchllm.runtime import signs_of_life
from torchllm.tools.continue_texts import continue_texts, sample_tokens

VOCAB = 258
GREEDY = Generate(tokens=24, temperature=0.0)
SAMPLED = Generate(tokens=24, temperature=1.5, top_k=20)
SIZES = {"layers": 2, "hidden": 32, "ffn": 64, "heads": 4, "max_sequence_length": 64, "initial_std": 0.3}
MODELS = {
    "rope and grouped heads": Model(kv_heads=2, **SIZES),
    "eager": Model(attention="eager", **SIZES),
    "window": Model(kv_heads=2, window=7, **SIZES),
    "Gemma 2": Model(
        **SIZES,
        kv_heads=2,
        norm_position="both",
        norm_offset=True,
        activation="gelu_tanh",
        attention="eager",
        softmax_scale=0.5,
        score_softcap=1.0,
        logit_softcap=3.0,
        embedding_multiplier=5.7,
        pattern=("local", "full"),
        kinds=Kinds(local={"window": 7}, full={}),
    ),
    "Gemma 4": Model(
        **SIZES,
        kv_heads=2,
        norm_position="both",
        v_norm=True,
        block_scale=True,
        softmax_scale=1.0,
        pattern=("local", "full"),
        kinds=Kinds(
            local={"window": 7},
            full={"head_dim": 12, "keys_as_values": True, "rope_proportional": True, "rotary_fraction": 0.5},
        ),
    ),
    "Gemma 4 with experts": Model(
        **SIZES, norm_position="both", v_norm=True, block_scale=True, experts=6, expert_ffn=24, dense_beside=True
    ),
    "Ministral 3": Model(
        **SIZES,
        rope_scaling="yarn",
        rope_scaling_factor=4.0,
        rope_original_length=16,
        rope_query_scale=0.7,
        rope_theta=100.0,  # by the default one, texts of this model repeat a token
    ),
    "OLMo Hybrid": Model(
        **SIZES,
        qk_norm="width",
        delta_negative=True,
        pattern=("delta", "full"),
        kinds=Kinds(delta={"mixer": "gated_delta"}, full={"norm_position": "after", "rotary_fraction": 0.0}),
    ),
    "gate": Model(**SIZES, attention_gate="element", softmax_scale=0.5, residual_multiplier=0.5),
    "Qwen3-Next": Model(
        **SIZES,
        kv_heads=2,
        qk_norm="head",
        norm_offset=True,
        attention_gate="element",
        rotary_fraction=0.5,
        pattern=("delta", "full"),
        kinds=Kinds(delta={"mixer": "gated_delta"}, full={}),
        experts=6,
        shared_experts=1,
        shared_gate=True,
    ),
    "nanochat": Model(family="nanochat", qk_norm="head", logit_softcap=15.0, **SIZES),
    "learned positions": Model(family="gpt", tied_embeddings=True, **SIZES),
    "experts by sigmoid scores": Model(
        experts=6, router_score="sigmoid", router_bias=True, qk_norm="width", rotary_fraction=0.5, **SIZES
    ),
    "experts": Model(experts=6, shared_experts=1, dense_layers=1, expert_ffn=24, **SIZES),
}
PROMPTS = [[256, 100, 101, 102, 32], [256], [256, *range(40, 60)], [256, 7, 8], [256, *range(90, 137)]]


def decoder(model: Model) -> Decoder:
    with torch.device("meta"):
        made = build_model(model)
    initialize([made], model, torch.device("cpu"), seed=3)
    return made


def continued(
    model: Decoder,
    prompts: Sequence[list[int]],
    settings: Generate = GREEDY,
    end: int = -1,
    longest: int = 64,
    seed: int = 0,
    batch_size: int = 16,
) -> list[list[int]]:
    seeds = range(seed, seed + len(prompts))
    return continue_texts(
        model, prompts, settings, vocab=VOCAB, ends={end}, longest=longest, seeds=seeds, batch_size=batch_size
    )


@torch.no_grad()
def recomputed(model: Decoder, prompt: list[int], count: int) -> list[int]:
    """The greedy continuation without a cache: the whole text goes through the model for every token."""
    tokens = list(prompt)
    for _ in range(count):
        logits = model(torch.tensor([tokens]), torch.arange(len(tokens)).unsqueeze(0))[0, -1, :VOCAB]
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize("name", MODELS)
def test_neither_the_cache_nor_the_batch_changes_a_text(name: str) -> None:
    model = decoder(MODELS[name])
    counts = [min(GREEDY.tokens, 65 - len(prompt)) for prompt in PROMPTS]
    expected = [recomputed(model, prompt, count) for prompt, count in zip(PROMPTS, counts, strict=True)]
    assert min(len(set(text)) for text in expected) > 3  # a model that repeats one token would show little
    for batch_size in (1, 2, 16):
        assert continued(model, PROMPTS, batch_size=batch_size) == expected, batch_size
    alone = [continued(model, [prompt], SAMPLED, seed=5 + i)[0] for i, prompt in enumerate(PROMPTS)]
    assert continued(model, PROMPTS, SAMPLED, seed=5) == alone
    assert len({tuple(text) for text in continued(model, [[256]] * 3, SAMPLED)}) == 3
    assert recomputed(model, PROMPTS[0], 24) == expected[0]  # the model is as it was


def test_a_core_that_cannot_hide_padding_gets_one_text_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    class Flash(EagerAttention):
        def mask(self, document_ids: torch.Tensor | None, document_limit: int = 0) -> None:
            return None

    monkeypatch.setitem(CORES, "flash", Flash)
    expected = continued(decoder(MODELS["eager"]), PROMPTS)
    assert continued(decoder(dataclasses.replace(MODELS["eager"], attention="flash")), PROMPTS) == expected


def test_each_text_stops_at_its_end_token() -> None:
    model = decoder(Model(**SIZES))
    free = continued(model, PROMPTS)
    assert (signs_of_life._Progress.text or str)() == f"{GREEDY.tokens} of up to {GREEDY.tokens} tokens"
    continued(model, PROMPTS, batch_size=1)
    assert (signs_of_life._Progress.text or str)() == f"{len(PROMPTS) - 1} of {len(PROMPTS)} texts"
    end = next(token for token in free[0] if token != free[0][0])
    stopped = [text[: text.index(end) + 1] if end in text else text for text in free]
    assert stopped != free
    assert continued(model, PROMPTS, end=end) == stopped


def test_a_model_whose_logits_are_nan_is_refused() -> None:
    """argmax would return an id for them, too."""
    model = decoder(Model(**SIZES))
    with torch.no_grad():
        next(model.parameters()).fill_(torch.nan)
    with pytest.raises(UserError, match="logits are NaN"):
        continued(model, [[1, 2, 3]])


def test_each_text_stops_at_the_longest_text() -> None:
    """The begin token, then 10 of text. Learned positions end with their table."""
    prompts = [[256, 1, 2], [256, *range(10)], [256, *range(9)]]
    for model in (Model(**SIZES), Model(family="gpt", **(SIZES | {"max_sequence_length": 10}))):
        made = decoder(model)
        fitting = [prompts[0], prompts[2]]
        assert continued(made, fitting, longest=10) == [
            recomputed(made, fitting[0], 8),
            recomputed(made, fitting[1], 1),
        ]
        with pytest.raises(UserError, match="prompt 1 has 11 tokens: up to 10 fit"):
            continued(made, prompts, longest=10)


def sampled(settings: Generate) -> list[int]:
    """200 tokens from one set of logits, the highest the last."""
    logits = torch.tensor([[0.0, 1.0, 2.0, 3.0]])
    generator = torch.Generator().manual_seed(0)
    return [int(sample_tokens(logits, settings, [generator])) for _ in range(200)]


def test_samples_keep_to_the_top_and_to_the_temperature() -> None:
    assert set(sampled(Generate(top_k=3, temperature=1.5))) == {1, 2, 3}
    assert set(sampled(Generate(top_k=0, temperature=9.0))) == {0, 1, 2, 3}
    assert set(sampled(Generate(temperature=0.0))) == {3}
    cold = sampled(Generate(top_k=0, temperature=0.1))
    assert cold.count(3) > 190


def test_samples_are_those_of_multinomial() -> None:
    logits = torch.randn(3, 300, generator=torch.Generator().manual_seed(0))
    made = sample_tokens(logits, Generate(top_k=0), [torch.Generator().manual_seed(seed) for seed in range(3)])
    probabilities = (logits / 0.8).softmax(-1)
    for row, seed in zip(probabilities, range(3), strict=True):
        assert made[seed] == torch.multinomial(row, 1, generator=torch.Generator().manual_seed(seed))
