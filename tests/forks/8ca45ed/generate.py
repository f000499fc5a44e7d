"""Samples text from a checkpoint, on one device, with a cache of keys and values.

    python recipes/generate.py RUN_FOLDER/config.toml [--generate.prompt="…"] [--checkpoint.resume=STEP_FOLDER]

The newest checkpoint of the run folder that verifies is used, unless another is named. With generate.chat, which
recipes/finetune.py sets, the prompt is a user's message; without a prompt each line of the standard input is one.
"""

import sys

from torchllm.config import Config, Generate
from torchllm.start import load_run

if __name__ == "__main__":
    CONFIG = load_run(sys.argv[1:], one_device=True)

from collections.abc import Collection, Iterable
from contextlib import suppress

import torch
from torch import Tensor

from torchllm.checkpoint.initial import load_weights_of_run
from torchllm.data.chat.examples import Conversation
from torchllm.data.chat.plan import chat_format_of_run
from torchllm.data.chat.template import Message
from torchllm.data.tokenizer import Tokenizer, load_tokenizer
from torchllm.models.attention import Attention, CachedAttention
from torchllm.models.decoder import Decoder, build_model, hold_in
from torchllm.models.lora import apply_lora
from torchllm.parallel.initialize import materialize
from torchllm.runtime.error_report import report_errors
from torchllm.runtime.process import choose_device, compute_dtype
from torchllm.runtime.terminal import drop_unwritten_output


def main(config: Config) -> str:
    """Print and return the prompt and its continuation; of a chat, the answers."""
    report_errors()
    device = choose_device(config.run.device, local_rank=0)
    with torch.device("meta"):
        model = build_model(config.model)
    dtype = compute_dtype(config.training, device)
    apply_lora(model, config.lora, dtype)
    hold_in(model, dtype)
    materialize([model], device)
    manifest = load_weights_of_run(config, [model])
    tokenizer = load_tokenizer(config.data.tokenizer, config.data.pattern)
    generator = torch.Generator(device).manual_seed(config.run.seed)
    if config.generate.chat:
        print_text(f"--- step {manifest.step}, a chat at temperature {config.generate.temperature:g} ---")
        prompts = [config.generate.prompt] if config.generate.prompt else (line.strip() for line in sys.stdin)
        return chat(config, model, tokenizer, prompts, generator)
    [prompt] = tokenizer.encode_documents([config.generate.prompt])
    begin = [] if tokenizer.begin is None else [tokenizer.begin]
    first_tokens = [*begin, *prompt.tolist()] or [tokenizer.end]  # without a prompt: what follows a document
    tokens = torch.tensor([first_tokens], device=device)
    max_length = config.model.max_sequence_length
    generated = continue_text(model, tokens, config.generate, tokenizer.vocab, {tokenizer.end}, max_length, generator)
    text = tokenizer.decode([*prompt.tolist(), *generated])
    heading = f"--- step {manifest.step}, {len(generated)} tokens at temperature {config.generate.temperature:g} ---"
    print_text(f"{heading}\n{text}")
    return text


def chat(
    config: Config, model: Decoder, tokenizer: Tokenizer, prompts: Iterable[str], generator: torch.Generator
) -> str:
    """Answer the messages of a user, each with the conversation so far; print and return the answers, a line each."""
    chat_format = chat_format_of_run(config.data.tokenizer, config.finetune.chat_template)
    ends = {tokenizer.end, chat_format.end_of_turn()}
    messages: list[Message] = []
    answers: list[str] = []
    for prompt in prompts:
        messages.append({"role": "user", "content": prompt})
        ids = chat_format.prompt(Conversation(messages))
        tokens = torch.tensor([ids.tolist()], device=generator.device)
        max_length = config.model.max_sequence_length
        generated = continue_text(model, tokens, config.generate, tokenizer.vocab, ends, max_length, generator)
        if generated and generated[-1] in ends:
            generated.pop()
        answers.append(tokenizer.decode(generated))
        messages.append({"role": "assistant", "content": answers[-1]})
        print_text(answers[-1])
    return "\n".join(answers)


def print_text(text: str) -> None:
    """Print what a model has written, as far as somebody can read it."""
    encoding = sys.stdout.encoding or "utf-8"  # a terminal may be unable to show all that a model writes
    with suppress(OSError):  # a sample that nobody can read is no failure of the training before it
        print(text.encode(encoding, errors="replace").decode(encoding), flush=True)
    drop_unwritten_output()


@torch.no_grad()
def continue_text(
    model: Decoder,
    tokens: Tensor,
    settings: Generate,
    vocab: int,
    ends: Collection[int | None],
    max_length: int,
    generator: torch.Generator,
) -> list[int]:
    """Return up to `settings.tokens` ids that follow `tokens` (1, S), each less than `vocab`.

    It stops at an id of `ends`, and when the text has `max_length` tokens.
    """
    for module in list(model.modules()):
        if isinstance(module, Attention):
            core = module.core.core if isinstance(module.core, CachedAttention) else module.core
            module.core = CachedAttention(core)  # without what was cached of another text
    positions = torch.arange(tokens.shape[1], device=tokens.device).unsqueeze(0)  # (1, S)
    generated: list[int] = []
    while len(generated) < settings.tokens and int(positions[0, -1]) < max_length:
        logits = model(tokens, positions)[0, -1]
        token = sample_token(logits[:vocab].float(), settings, generator)  # ids beyond `vocab` were never trained
        generated.append(token)
        if token in ends:
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
