"""Continue token ids with a model, several texts at a time."""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from torchllm.config import Generate
from torchllm.config.errors import UserError
from torchllm.models.decoder import Decoder
from torchllm.models.mixer import Mixer
from torchllm.runtime.signs_of_life import show_progress

TOKENS_PER_WAIT = 16
"""a GPU is asked this often whether all texts have ended: each answer waits for it"""


@torch.no_grad()
def continue_texts(
    model: Decoder,
    prompts: Sequence[Sequence[int]],
    settings: Generate,
    *,
    vocab: int,
    ends: Collection[int],
    longest: int,
    seeds: Sequence[int] | None = None,
    batch_size: int = 16,
    all_ended: Callable[[Tensor], bool] = lambda has_ended: bool(has_ended.all()),
) -> list[list[int]]:
    """Return up to `settings.tokens` ids that follow each prompt, each id less than `vocab`.

    A text stops at an id of `ends`, which is its last, and when it has `longest` tokens. Text i is sampled with
    `seeds[i]`, by default i, so that it does not depend on the texts that are computed with it, `batch_size` at a time.
    UserError if a prompt is longer than that, or the model's logits are NaN.

    all_ended: whether to stop early, given which texts of a batch have ended, (B); it may ask other ranks.
    """
    for index, prompt in enumerate(prompts):
        if len(prompt) > longest:
            raise UserError(f"prompt {index} has {len(prompt)} tokens: up to {longest} fit into the model's context")
    seeds = range(len(prompts)) if seeds is None else seeds
    texts: list[list[int]] = [[] for _ in prompts]
    order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))  # little padding
    if not _takes_documents(model):
        batch_size = 1
    for start in range(0, len(order), batch_size):
        batch = order[start : start + batch_size]
        limits = [min(settings.tokens, longest + 1 - len(prompts[index])) for index in batch]
        generators = [torch.Generator(_device(model)).manual_seed(seeds[index]) for index in batch]
        batch_prompts = [list(prompts[index]) for index in batch]
        done = f"{start:,} of {len(order):,} texts" if len(order) > batch_size else ""
        rows = _continue_batch(
            model, batch_prompts, settings, max(limits), vocab, ends, longest, generators, done, all_ended
        )
        for index, row, limit in zip(batch, rows, limits, strict=True):
            length = next((length for length, token in enumerate(row, 1) if token in ends), limit)
            texts[index] = row[: min(length, limit)]
    return texts


def _continue_batch(
    model: Decoder,
    prompts: list[list[int]],
    settings: Generate,
    count: int,
    vocab: int,
    ends: Collection[int],
    longest: int,
    generators: Sequence[torch.Generator],
    done: str,
    all_ended: Callable[[Tensor], bool],
) -> list[list[int]]:
    """Return `count` ids that follow each prompt, fewer if all texts have ended; ids after an end mean nothing.

    done: how far all batches are, for the progress; "" for a single one, whose tokens are counted then.
    """
    device = _device(model)
    length = max(map(len, prompts))
    tokens = torch.tensor([[0] * (length - len(prompt)) + prompt for prompt in prompts], device=device)
    begins = torch.tensor([[length - len(prompt)] for prompt in prompts], device=device)
    positions = torch.arange(length, device=device) - begins  # (B, S)
    padding = positions < 0 if len(prompts[0]) < length or len(prompts[-1]) < length else None
    documents = None if padding is None else (~padding).long()  # prompts do not see the padding before them
    positions = positions.clamp(min=0)
    end_ids = torch.tensor(sorted(ends), device=device)
    has_ended = torch.zeros(len(prompts), dtype=torch.bool, device=device)
    is_nan = torch.zeros((), dtype=torch.bool, device=device)
    generated: list[Tensor] = []
    with caching(model, room=length + count, padding=padding):
        while len(generated) < count:
            logits = model(tokens, positions, documents)[:, -1, :vocab]  # ids beyond `vocab` were never trained
            is_nan |= logits.isnan().any()
            generated.append(sample_tokens(logits.float(), settings, generators))
            show_progress((done or f"{len(generated):,} of up to {count:,} tokens").format)
            has_ended |= torch.isin(generated[-1], end_ids)
            if (device.type == "cpu" or len(generated) % TOKENS_PER_WAIT == 0) and all_ended(has_ended):
                break
            # The cache has all keys and values before: only the new tokens go through the model.
            tokens, documents = generated[-1].unsqueeze(1), None
            positions = (positions[:, -1:] + 1).clamp(max=longest - 1)  # a text that has ended goes on with the others
    if bool(is_nan):
        raise UserError("the model's logits are NaN: its weights are damaged, or its training has diverged")
    return torch.stack(generated, dim=1).tolist()


def sample_tokens(logits: Tensor, settings: Generate, generators: Sequence[torch.Generator]) -> Tensor:
    """Return an id per text, (B), by temperature and top-k from logits (B, V); a generator per text.

    The same ids as by `torch.multinomial`, which waits for the GPU: it divides by exponential noise, too.
    """
    if settings.temperature == 0.0:
        return logits.argmax(-1)
    if 0 < settings.top_k < logits.shape[-1]:
        threshold = logits.topk(settings.top_k).values[:, -1:]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = (logits / settings.temperature).softmax(-1)
    noise = torch.empty_like(probabilities)
    for row, generator in zip(noise, generators, strict=True):
        row.exponential_(generator=generator)
    return (probabilities / noise).argmax(-1)


@contextmanager
def caching(model: Decoder, *, room: int, padding: Tensor | None) -> Iterator[None]:
    """Let a model's mixers cache, and compute only the logits of the last token. room, padding: of `Mixer`."""
    plain = {layer: layer.core for layer in model.modules() if isinstance(layer, Mixer)}
    for layer in plain:
        layer.core = layer.cached_core(room=room, padding=padding)
    assert model.lm_head is not None  # the model is whole
    hook = model.lm_head.register_forward_pre_hook(lambda _, inputs: (inputs[0][:, -1:], *inputs[1:]))
    try:
        yield
    finally:
        hook.remove()
        for layer, core in plain.items():
            layer.core = core


def _takes_documents(model: Decoder) -> bool:
    """Return whether the attention core can hide padding; the one of the package flash-attn cannot."""
    ids = torch.zeros(1, 1, dtype=torch.int64, device=_device(model))
    return all(layer.core.mask(ids, 0) is not None for layer in model.modules() if isinstance(layer, Mixer))


def _device(model: Decoder) -> torch.device:
    return next(model.parameters()).device
