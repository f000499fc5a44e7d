"""Samples text from a checkpoint, on one device, with a cache of keys and values.

    python recipes/generate.py RUN_FOLDER/config.toml [--generate.prompt="…"] [--checkpoint.resume=STEP_FOLDER]

The newest checkpoint of the run folder that verifies is used, unless another is named.
"""

import sys

from torchllm.config import Config, Generate
from torchllm.start import load_run

if __name__ == "__main__":
    CONFIG = load_run(sys.argv[1:], one_device=True)

from contextlib import suppress

import torch
from torch import Tensor

from torchllm.checkpoint.weights import load_newest_weights
from torchllm.data.tokenizer import load_tokenizer
from torchllm.models.attention import Attention, CachedAttention
from torchllm.models.decoder import Decoder, build_model
from torchllm.parallel.initialize import materialize
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.process import choose_device, compute_dtype
from torchllm.runtime.terminal import drop_unwritten_output


def main(config: Config) -> str:
    """Print and return the prompt and its continuation."""
    report_errors()
    device = choose_device(config.run.device, local_rank=0)
    with torch.device("meta"):
        model = build_model(config.model)
    model.to(compute_dtype(config.training, device))
    materialize([model], device)
    manifest = load_newest_weights(config.run.folder, config.checkpoint.resume, [model], cast=True)
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.pattern)
    [prompt] = tokenizer.encode_documents([config.generate.prompt])
    generator = torch.Generator(device).manual_seed(config.run.seed)
    tokens = torch.tensor([[tokenizer.begin, *prompt.tolist()]], device=device)
    max_length = config.model.max_sequence_length
    generated = continue_text(model, tokens, config.generate, tokenizer.vocab, tokenizer.end, max_length, generator)
    text = tokenizer.decode([*prompt.tolist(), *generated])
    encoding = sys.stdout.encoding or "utf-8"  # a terminal may be unable to show all that a model writes
    heading = f"--- step {manifest.step}, {len(generated)} tokens at temperature {config.generate.temperature:g} ---"
    with suppress(OSError):  # a sample that nobody can read is no failure of the training before it
        print(heading, text.encode(encoding, errors="replace").decode(encoding), sep="\n", flush=True)
    drop_unwritten_output()
    return text


@torch.no_grad()
def continue_text(
    model: Decoder,
    tokens: Tensor,
    settings: Generate,
    vocab: int,
    end: int,
    max_length: int,
    generator: torch.Generator,
) -> list[int]:
    """Return up to `settings.tokens` ids that follow `tokens` (1, S), each less than `vocab`.

    It stops at the id `end`, and when the text has `max_length` tokens.
    """
    for module in list(model.modules()):
        if isinstance(module, Attention):
            module.core = CachedAttention(module.core)
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)  # (1, S)
    generated: list[int] = []
    while len(generated) < settings.tokens and int(positions[0, -1]) < max_length:
        logits = model(tokens, positions)[0, -1]
        token = sample_token(logits[:vocab].float(), settings, generator)  # ids beyond `vocab` were never trained
        generated.append(token)
        if token == end:
            break
        # The cache has all keys and values before: only the new token goes through the model.
        tokens = tokens.new_tensor([[token]])
        positions = positions[:, -1:] + 1
    return generated


def sample_token(logits: Tensor, settings: Generate, generator: torch.Generator) -> int:
    """Return one id by temperature and top-k from logits (V)."""
    if settings.temperature == 0.0:
        return int(logits.argmax())
    if 0 < settings.top_k < len(logits):
        threshold = logits.topk(settings.top_k).values[-1]
        logits = logits.masked_fill(logits < threshold, -torch.inf)
    probabilities = (logits / settings.temperature).softmax(-1)
    return int(torch.multinomial(probabilities, 1, generator=generator))


if __name__ == "__main__":
    main(CONFIG)
