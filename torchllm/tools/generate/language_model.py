"""A trained model as a Python object: it continues texts, chats, and says how likely a text is.

model = torchllm.load("runs/mine")
model.generate(["def add(", "import "], temperature=0.0)
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchllm.checkpoint.manifest import Manifest
from torchllm.checkpoint.state import WEIGHTS
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.data.tokenizer import Tokenizer, bits_per_byte, load_tokenizer
from torchllm.models.cast import cast_parameters
from torchllm.models.decoder import Decoder, add_low_rank_updates, build_model
from torchllm.parallel.initialize import materialize
from torchllm.runtime.device import choose_device, compute_dtype
from torchllm.tools.config.checks import sampling_problems
from torchllm.tools.continue_texts import continue_texts
from torchllm.tools.front.resolve import load_model
from torchllm.tools.hub.initial import initial_weights
from torchllm.tools.hub.text_facts import published_ends
from torchllm.tools.hub.weights import AVERAGED_WEIGHTS
from torchllm.tools.hub.weights_of_run import load_weights_of_run
from torchllm.tools.prepare.chat.examples import ChatFormat
from torchllm.tools.prepare.chat.plan import chat_format, chat_plan_of_run, plan_chat
from torchllm.tools.prepare.chat.template import Conversation, Message, RefusedConversation


@dataclass
class LanguageModel:
    """A model on one device, with its tokenizer. `load` makes one."""

    config: Config
    model: Decoder
    tokenizer: Tokenizer
    manifest: Manifest | None
    """of the checkpoint; None: the model is a published one"""

    @property
    def origin(self) -> str:
        """The step of its run, or the name of the published model."""
        return self.config.model.from_hf if self.manifest is None else f"step {self.manifest.step}"

    def generate(
        self,
        prompts: Sequence[str],
        *,
        tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        batch_size: int = 16,
    ) -> list[str]:
        """Return each prompt with its continuation, of up to `tokens` tokens.

        tokens, temperature (0: always the likeliest token), top_k: by default those of [generate]. Prompt i is sampled
        with `seed` + i, by default run.seed. batch_size: texts that are computed at a time; it does not change them.
        """
        check_texts(prompts)
        ids = self._encode(prompts)
        starts = [[*self.begin, *text] or [self.tokenizer.end] for text in ids]  # the start of a new document
        new = self._continue(starts, self._ends, tokens, temperature, top_k, seed, batch_size)
        return [self.tokenizer.decode(text + more) for text, more in zip(ids, new, strict=True)]

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
    ) -> str:
        """Return the answer to a conversation, as [{"role": "user", "content": "Hello"}]. The rest as in `generate`.

        Raises UserError or DataError if the model has no chat template, or that cannot write the conversation.
        """
        (answer,) = self.answers([messages], tokens=tokens, temperature=temperature, top_k=top_k, seed=seed)
        return answer

    def answers(
        self,
        conversations: Sequence[Sequence[Message]],
        *,
        tokens: int | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        seed: int | None = None,
        batch_size: int = 16,
    ) -> list[str]:
        """Return the answer to each conversation. The rest as in `generate` and `chat`."""
        prompts = [self._chat_prompt(messages) for messages in conversations]
        ends = self._ends | set(self.chat_format.ends_of_turn.values())
        answers = self._continue(prompts, ends, tokens, temperature, top_k, seed, batch_size)
        return [self.tokenizer.decode(answer) for answer in answers]

    def room(self, messages: Sequence[Message]) -> int:
        """Return how many tokens the answer to a conversation may have; under 1: it is longer than the context."""
        return self.config.longest_text + 1 - len(self._chat_prompt(messages))

    def loss(self, texts: Sequence[str]) -> list[float]:
        """Return each text's mean loss in nats per token. Its first token follows the start of a document."""
        return [nats / len(ids) for nats, ids in self._nats(texts)]

    def bits_per_byte(self, texts: Sequence[str]) -> list[float]:
        """Return each text's loss in bits per byte of UTF-8, comparable between tokenizers."""
        sizes = self.tokenizer.byte_lengths
        return [bits_per_byte(nats, int(sizes[ids].sum())) for nats, ids in self._nats(texts)]

    @cached_property
    def chat_format(self) -> ChatFormat:
        """How conversations are written: as in the run, or as the published model's template says."""
        config = self.config
        if self.manifest is None:
            plan = plan_chat(config.data.tokenizer, config.finetune, config.training.sequence_length)
        else:
            trained = chat_plan_of_run(config, self.manifest.data, self.manifest.record)
            if trained is None:
                raise UserError("this model was not trained on conversations: use generate, or generate.chat = true")
            plan = trained
        return chat_format(config.data.tokenizer, plan)

    @cached_property
    def begin(self) -> list[int]:
        """The ids before each text."""
        return list(self.tokenizer.begins)

    @cached_property
    def _ends(self) -> set[int]:
        """The ids that end a text."""
        name = self.config.model.from_hf if self.manifest is None else ""
        return {self.tokenizer.end, *published_ends(name, self.tokenizer)}

    def _chat_prompt(self, messages: Sequence[Message]) -> list[int]:
        try:
            return self.chat_format.prompt(Conversation(list(messages))).tolist()
        except RefusedConversation as error:
            raise UserError(f"a conversation: {error}") from error

    def _encode(self, texts: Sequence[str]) -> list[list[int]]:
        return [ids.tolist() for ids in self.tokenizer.encode_documents(list(texts))]

    def _continue(
        self,
        prompts: list[list[int]],
        ends: set[int],
        tokens: int | None,
        temperature: float | None,
        top_k: int | None,
        seed: int | None,
        batch_size: int,
    ) -> list[list[int]]:
        """Return the ids that follow each prompt, without the end."""
        chosen: dict[str, Any] = {"tokens": tokens, "temperature": temperature, "top_k": top_k}
        given = {name: value for name, value in chosen.items() if value is not None}
        settings = replace(self.config.generate, **given)
        if settings.tokens < 1 or settings.top_k < 0 or batch_size < 1:
            raise UserError("tokens and batch_size must be at least 1, top_k at least 0")
        for problem in sampling_problems(settings):
            raise UserError(f"temperature {problem.message}")
        first_seed = self.config.run.seed if seed is None else seed
        texts = continue_texts(
            self.model,
            prompts,
            settings,
            vocab=self.tokenizer.vocab,
            ends=ends,
            longest=self.config.longest_text,
            seeds=range(first_seed, first_seed + len(prompts)),
            batch_size=batch_size,
        )
        return [text[:-1] if text and text[-1] in ends else text for text in texts]

    @torch.no_grad()
    def _nats(self, texts: Sequence[str]) -> list[tuple[float, list[int]]]:
        """Return the loss of each text, in nats, and its tokens."""
        check_texts(texts)
        losses = []
        device = next(self.model.parameters()).device
        for index, ids in enumerate(self._encode(texts)):
            if not 0 < len(ids) <= self.config.longest_text:
                raise UserError(
                    f"text {index} has {len(ids)} tokens: from 1 to {self.config.longest_text} are possible"
                )
            row = torch.tensor([[*(self.begin or [self.tokenizer.end]), *ids]], device=device)
            positions = torch.arange(len(ids), device=device).unsqueeze(0)
            depth = self.config.model.mtp_depth
            ahead = row.new_zeros(1, 2, depth, len(ids)) if depth else None  # not read without gradients
            losses.append((self.model(row[:, :-1], positions, None, row[:, 1:], 0, ahead).item(), ids))
        return losses


def check_texts(texts: Sequence[str]) -> None:
    """Raise TypeError if there is one text instead of a list of them."""
    if isinstance(texts, str):
        raise TypeError("give a list of texts, not one text")


def load(
    path: str | Path, *, device: str | None = None, dtype: str | None = None, ema: bool | None = None
) -> LanguageModel:
    """Return the model of a run, of a checkpoint in it, or of a folder or id of Hugging Face.

    path: a run's folder, its config.toml or the folder of a step. device, dtype, ema: run.device, training.dtype and
    generate.ema, by default those of the run. Raises UserError if there is no such model; the lines on stderr say why.
    """
    overrides = [f"--run.device={device}"] if device else []
    overrides += [f"--training.dtype={dtype}"] if dtype else []
    overrides += [] if ema is None else [f"--generate.ema={str(ema).lower()}"]
    try:
        return language_model(load_model([str(path), *overrides]))
    except SystemExit as error:
        raise UserError(f"{path}: cannot be loaded, for the reasons above") from error


def language_model(config: Config) -> LanguageModel:
    """Return the model of a config by `load_model`: with a run's weights, or, without run.folder, published ones."""
    device = choose_device(config.run.device, local_rank=0)
    with torch.device("meta"):
        model = build_model(config.model)
    dtype = compute_dtype(config.training, device)
    add_low_rank_updates(model, config, dtype)
    cast_parameters(model, dtype)
    materialize([model], device)
    manifest = None
    if config.run.folder:
        prefix = AVERAGED_WEIGHTS if config.generate.ema else WEIGHTS
        manifest = load_weights_of_run(config, [model], prefix=prefix)
    else:
        source = initial_weights(config)
        assert source is not None  # model.from_hf is set
        source.load([model], None)
    return LanguageModel(config, model, load_tokenizer(config.data.tokenizer), manifest)
