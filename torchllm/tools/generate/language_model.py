"""A trained model as a Python object: it continues texts, chats, and says how likely a text is.

model = torchllm.load("runs/mine")
model.generate(["def add(", "import "], temperature=0.0)
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch

from torchllm.checkpoint.manifest import MANIFEST, Manifest
from torchllm.config import Config
from torchllm.config.errors import UserError
from torchllm.data.tokenizer import Tokenizer, load_tokenizer
from torchllm.models.decoder import Decoder, add_low_rank_updates, build_model, cast_parameters
from torchllm.parallel.initialize import materialize
from torchllm.runtime.device import choose_device, compute_dtype
from torchllm.tools.config.load import read_draft
from torchllm.tools.config.refuse import finish
from torchllm.tools.front.resolve import load_run, resolve_published_model
from torchllm.tools.generate.continue_texts import continue_texts
from torchllm.tools.hub.hub import find_hub_model
from torchllm.tools.hub.initial import initial_weights, load_weights_of_run
from torchllm.tools.hub.text_facts import published_ends
from torchllm.tools.prepare.chat.examples import ChatFormat, Conversation
from torchllm.tools.prepare.chat.plan import chat_format_today, chat_plan_of_run, plan_chat
from torchllm.tools.prepare.chat.template import Message


def begin_of_text(tokenizer: Tokenizer, fingerprints: Sequence[str]) -> list[int]:
    """Return the ids before a document in corpora of a tokenizer with these fingerprints, of any version.

    Without a fingerprint of this tokenizer: the current ids.
    """
    known = [tokenizer.begins[fingerprint] for fingerprint in fingerprints if fingerprint in tokenizer.begins]
    begin = known[0] if known else tokenizer.begin
    return [] if begin is None else [begin]


@dataclass
class LanguageModel:
    """A model on one device, with its tokenizer. `load` makes one."""

    config: Config
    model: Decoder
    tokenizer: Tokenizer
    manifest: Manifest | None
    """of the checkpoint; None: the model is a published one"""

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
        starts = [[*self._begin, *text] or [self.tokenizer.end] for text in ids]  # the start of a new document
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

        Raises UserError or DataError if the model has no chat template, RefusedConversation if that cannot write it.
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
        prompts = [self.chat_format.prompt(Conversation(list(messages))).tolist() for messages in conversations]
        ends = self._ends | set(self.chat_format.ends_of_turn.values())
        answers = self._continue(prompts, ends, tokens, temperature, top_k, seed, batch_size)
        return [self.tokenizer.decode(answer) for answer in answers]

    def loss(self, texts: Sequence[str]) -> list[float]:
        """Return each text's mean loss in nats per token. Its first token follows the start of a document."""
        return [nats / len(ids) for nats, ids in self._nats(texts)]

    def bits_per_byte(self, texts: Sequence[str]) -> list[float]:
        """Return each text's loss in bits per byte of UTF-8, comparable between tokenizers."""
        losses = self._nats(texts)
        return [nats / math.log(2) / len(text.encode()) for text, (nats, _) in zip(texts, losses, strict=True)]

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
        return chat_format_today(config.data.tokenizer, plan)

    @cached_property
    def _begin(self) -> list[int]:
        """The ids before each text."""
        data = self.manifest.data if self.manifest is not None else {}
        return begin_of_text(self.tokenizer, data.get("fingerprint", {}).get("tokenizer", ()))

    @cached_property
    def _ends(self) -> set[int]:
        """The ids that end a text."""
        name = self.config.model.from_hf if self.manifest is None else ""
        return {self.tokenizer.end, *published_ends(name, self.tokenizer)}

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
        if settings.tokens < 1 or settings.temperature < 0 or settings.top_k < 0 or batch_size < 1:
            raise UserError("tokens and batch_size must be at least 1, temperature and top_k at least 0")
        texts = continue_texts(
            self.model,
            prompts,
            settings,
            vocab=self.tokenizer.vocab,
            ends=ends,
            longest=self.config.longest_text,
            seed=self.config.run.seed if seed is None else seed,
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
            row = torch.tensor([[*(self._begin or [self.tokenizer.end]), *ids]], device=device)
            positions = torch.arange(len(ids), device=device).unsqueeze(0)
            losses.append((self.model(row[:, :-1], positions, None, row[:, 1:]).item(), ids))
        return losses


def check_texts(texts: Sequence[str]) -> None:
    """Raise TypeError if there is one text instead of a list of them."""
    if isinstance(texts, str):
        raise TypeError("give a list of texts, not one text")


def load(path: str | Path, *, device: str | None = None, dtype: str | None = None) -> LanguageModel:
    """Return the model of a run folder, of a step folder in one, or of a folder or id of Hugging Face.

    device, dtype: run.device and training.dtype, by default those of the run. Raises UserError if there is no such
    model; the lines on stderr say why.
    """
    overrides = [f"--run.device={device}"] if device else []
    overrides += [f"--training.dtype={dtype}"] if dtype else []
    folder = Path(path)
    try:
        if (folder / MANIFEST).is_file():
            step = [str(folder.absolute().parents[1] / "config.toml"), f"--checkpoint.resume={folder.absolute()}"]
            return language_model(load_run([*step, *overrides], one_device=True))
        if (folder / "config.toml").is_file():
            return language_model(load_run([str(folder / "config.toml"), *overrides], one_device=True))
        return _load_published(str(path), overrides)
    except SystemExit as error:
        raise UserError(f"{path}: cannot be loaded, for the reasons above") from error


def _load_published(name: str, overrides: list[str]) -> LanguageModel:
    """Return a model of Hugging Face."""
    found = find_hub_model(name, weights=True, may_download=True)
    tokenizer = found.folder / "tokenizer.json"
    arguments = [f"--model.from_hf={found.pinned}", f"--data.tokenizer={tokenizer}", *overrides]
    draft = read_draft(arguments, Config, one_device=True)
    resolve_published_model(draft)
    return language_model(finish(draft), is_published=True)


def language_model(config: Config, *, is_published: bool = False) -> LanguageModel:
    """Return the model of a run, with the weights that `load_weights_of_run` finds; is_published: of model.from_hf."""
    device = choose_device(config.run.device, local_rank=0)
    with torch.device("meta"):
        model = build_model(config.model)
    dtype = compute_dtype(config.training, device)
    add_low_rank_updates(model, config, dtype)
    cast_parameters(model, dtype)
    materialize([model], device)
    manifest = None
    if is_published:
        source = initial_weights(config)
        assert source is not None  # model.from_hf is set
        source.load([model], None)
    else:
        manifest = load_weights_of_run(config, [model])
    return LanguageModel(config, model, load_tokenizer(config.data.tokenizer, config.data.pattern), manifest)
