"""Our models for lm-evaluation-harness, which builds the requests of tasks and scores them. Extra: lm-eval."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from torchllm.runtime.signs_of_life import show_progress
from torchllm.tools.generate.continue_texts import continue_texts
from torchllm.tools.generate.language_model import LanguageModel

Scored = tuple[float, bool]
"""log-likelihood of a continuation, and whether each of its tokens is the likeliest"""


class HarnessModel(TemplateLM):
    """Computes what the harness asks for, `batch_size` texts at a time, the longest first."""

    def __init__(self, model: LanguageModel, batch_size: int) -> None:
        super().__init__()
        self.model, self.batch_size = model, batch_size
        self.longest = model.config.longest_text

    @property
    def eot_token_id(self) -> int:
        return self.model.tokenizer.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return (self.model.begin or [self.eot_token_id])[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; unless `add_special_tokens` is false, with those that begin a document.

        FOOTGUN: the model never saw a text without them; its log-likelihoods would be far off, and plausible.
        """
        (ids,) = self.model.tokenizer.encode_documents([string])
        return [*([] if add_special_tokens is False else self.model.begin), *ids.tolist()]

    @torch.no_grad()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[Scored]:
        """Score continuations. requests: (unused, ids of the context, ids of the continuation).

        A text that is longer than the model's context loses its begin, as with the harness's own models.
        """
        texts = [[*context, *continuation][-(self.longest + 1) :] for _, context, continuation in requests]
        sizes = [min(len(request[2]), len(text) - 1) for request, text in zip(requests, texts, strict=True)]
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        scores: dict[int, Scored] = {}
        for start in range(0, len(order), self.batch_size):
            show_progress(f"{start:,} of {len(order):,} texts rated".format)
            batch = order[start : start + self.batch_size]
            rated = self._rate([texts[index] for index in batch], [sizes[index] for index in batch])
            scores |= dict(zip(batch, rated, strict=True))
        return [scores[index] for index in range(len(texts))]

    def _rate(self, texts: list[list[int]], sizes: list[int]) -> list[Scored]:
        """Score the last `sizes` tokens of each text; the first text is the longest."""
        device = next(self.model.model.parameters()).device
        length = len(texts[0]) - 1
        # Padding is behind the texts, so that causal attention does not see it.
        tokens = torch.tensor([text[:-1] + [0] * (length + 1 - len(text)) for text in texts], device=device)
        positions = torch.arange(length, device=device).expand_as(tokens)
        logits = self.model.model(tokens, positions)[..., : self.model.tokenizer.vocab]  # others were never trained
        rated = []
        for row, text, size in zip(logits, texts, sizes, strict=True):
            targets = torch.tensor(text[-size:], device=device)
            of_targets = row[len(text) - 1 - size : len(text) - 1].float().log_softmax(-1)
            likeliest = of_targets.argmax(-1) == targets
            rated.append(torch.stack((of_targets.gather(1, targets[:, None]).sum(), likeliest.all().float())))
        return [(total, bool(is_greedy)) for total, is_greedy in torch.stack(rated).tolist()]

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the model's context.

        Each follows one token that begins a document; the harness's `hf` has two, and counts the second.
        """
        windows, owners = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.longest, context_len=1):
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to its first stop text or the end of the document."""
        alike: defaultdict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            alike[repr(request.args[1])].append(index)
        answers = [""] * len(requests)
        for indices in alike.values():
            wanted = normalize_gen_kwargs(requests[indices[0]].args[1])
            tokens, temperature = min(wanted["max_gen_toks"], self.longest), float(wanted.get("temperature", 0.0))
            settings = replace(
                self.model.config.generate, tokens=tokens, temperature=temperature, top_k=int(wanted.get("top_k", 0))
            )
            room = max(1, self.longest - tokens)
            continued = continue_texts(
                self.model.model,
                [self.tok_encode(requests[index].args[0])[-room:] for index in indices],
                settings,
                vocab=self.model.tokenizer.vocab,
                ends={self.eot_token_id},
                longest=self.longest,
                seed=self.model.config.run.seed,
                batch_size=self.batch_size,
            )
            for index, ids in zip(indices, continued, strict=True):
                text = self.model.tokenizer.decode([token for token in ids if token != self.eot_token_id])
                places = [text.find(stop) for stop in wanted["until"] if stop and stop in text]
                answers[index] = text[: min(places, default=len(text))]
        return answers
