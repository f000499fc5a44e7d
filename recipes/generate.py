"""Samples text from a checkpoint, on one device, with a cache of keys and values.

    python recipes/generate.py RUN_FOLDER/config.toml [--generate.prompt="…"] [--checkpoint.resume=STEP_FOLDER]

A run folder's config.toml names the run; its newest checkpoint that verifies is used unless another is named.
"""

import sys

from torchllm.config import Config, Generate, load_config

if __name__ == "__main__":
    CONFIG = load_config(sys.argv[1:], one_device=True)

import torch
from torch import Tensor

from torchllm.checkpoint.checkpointer import find_checkpoint, load_weights
from torchllm.data.tokenizer import load_tokenizer
from torchllm.models.attention import Attention, CachedAttention
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import initialize
from torchllm.runtime.process import choose_device, compute_dtype, report_errors


def main(config: Config) -> str:
    """Print and return the prompt and its continuation."""
    report_errors()
    device = choose_device(config.run.device, local_rank=0)
    folder = find_checkpoint(config.run.folder, config.checkpoint.resume)
    with torch.device("meta"):
        model = build_model(config.model)
    initialize([model], config.model, device, config.run.seed)
    manifest = load_weights(folder, model)
    model.to(compute_dtype(config.training, device))
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.pattern)
    (prompt,) = tokenizer.encode_documents([config.generate.prompt])
    generator = torch.Generator(device).manual_seed(config.run.seed)
    first = torch.tensor([[tokenizer.begin, *prompt.tolist()]], device=device)
    longest = config.model.max_sequence_length
    new = continue_text(model, first, config.generate, tokenizer.vocab, tokenizer.end, longest, generator)
    text = tokenizer.decode([*prompt.tolist(), *new])
    encoding = sys.stdout.encoding or "utf-8"  # not every terminal's can say all that a model writes
    print(f"--- step {manifest.step}, {len(new)} tokens at temperature {config.generate.temperature:g} ---")
    print(text.encode(encoding, errors="replace").decode(encoding))
    return text


@torch.no_grad()
def continue_text(
    model: Decoder, tokens: Tensor, settings: Generate, vocab: int, end: int, longest: int, generator: torch.Generator
) -> list[int]:
    """Up to `settings.tokens` ids that follow `tokens` (1, S), until `end` or `longest` positions; ids are < vocab."""
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.core = CachedAttention(module.core)
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)
    found: list[int] = []
    while len(found) < settings.tokens and int(positions[0, -1]) < longest:
        logits = model(tokens, positions)[0, -1, :vocab].float()  # rows past the tokenizer's were never trained
        found.append(choose(logits, settings, generator))
        if found[-1] == end:
            break
        tokens, positions = tokens.new_tensor([found[-1:]]), positions[:, -1:] + 1
    return found


def choose(logits: Tensor, settings: Generate, generator: torch.Generator) -> int:
    """One id by temperature and top-k from logits (V)."""
    if settings.temperature == 0.0:
        return int(logits.argmax())
    if 0 < settings.top_k < len(logits):
        least = logits.topk(settings.top_k).values[-1]
        logits = logits.masked_fill(logits < least, -torch.inf)
    return int(torch.multinomial((logits / settings.temperature).softmax(-1), 1, generator=generator))


if __name__ == "__main__":
    main(CONFIG)
