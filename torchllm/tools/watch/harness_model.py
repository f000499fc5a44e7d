"""Our models for lm-evaluation-harness, which builds the requests of tasks and scores them. Extra: lm-eval."""

import logging
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from lm_eval.api.instance import Instance
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window

from torchllm.config.errors import UserError
from torchllm.data.tokenizer import Tokenizer
from torchllm.tools.watch.text_ranks import Scored, TextRanks

log = logging.getLogger(__name__)


class HarnessModel(TemplateLM):
    """Encodes the requests of the harness, and lets all ranks compute them; for rank 0."""

    def __init__(self, ranks: TextRanks, tokenizer: Tokenizer) -> None:
        super().__init__()
        self.ranks, self.codec, self.begin = ranks, tokenizer, list(tokenizer.begins)  # `tokenizer` is the harness's

    @property
    def eot_token_id(self) -> int:
        return self.codec.end

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without a context."""
        return (self.begin or [self.eot_token_id])[-1]

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Return the ids of a text; unless `add_special_tokens` is false, with those that begin a document.

        FOOTGUN: the model never saw a text without them; its log-likelihoods would be far off, and plausible.
        """
        (ids,) = self.codec.encode_documents([string])
        return [*([] if add_special_tokens is False else self.begin), *ids.tolist()]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], **kwargs: Any
    ) -> list[Scored]:
        """Score continuations. requests: (unused, ids of the context, ids of the continuation).

        A text that is longer than the model's context loses its begin, as with the harness's own models.
        """
        texts = [[*context, *continuation][-(self.ranks.longest + 1) :] for _, context, continuation in requests]
        sizes = [min(len(request[2]), len(text) - 1) for request, text in zip(requests, texts, strict=True)]
        scored: list[Scored] = self.ranks.ask("rate", texts, sizes, self.codec.vocab)
        return scored

    def loglikelihood_rolling(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[float]:
        """Return the log-likelihood of whole texts, in windows of the model's context.

        Each follows one token that begins a document; the harness's `hf` has two, and counts the second.
        """
        windows, owners = [], []
        for index, request in enumerate(requests):
            ids = self.tok_encode(request.args[0], add_special_tokens=False)
            for window in get_rolling_token_windows(ids, self.prefix_token_id, self.ranks.longest, context_len=1):
                context, continuation = make_disjoint_window(window)
                windows.append((None, context, continuation))
                owners.append(index)
        totals = [0.0] * len(requests)
        for owner, (total, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[owner] += total
        return totals

    def generate_until(self, requests: Sequence[Instance], disable_tqdm: bool = False) -> list[str]:
        """Return the continuation of each text, up to its first stop text or the end of the document."""
        by_settings: defaultdict[str, list[int]] = defaultdict(list)
        for index, request in enumerate(requests):
            by_settings[repr(request.args[1])].append(index)
        answers = [""] * len(requests)
        for indices in by_settings.values():
            wanted = normalize_gen_kwargs(requests[indices[0]].args[1])
            tokens, temperature = wanted["max_gen_toks"], float(wanted.get("temperature", 0.0))
            room = self.ranks.longest - tokens
            if room <= 0:
                raise UserError(
                    f"evaluate.tasks: a task continues texts by up to {tokens} tokens (max_gen_toks), and the model's "
                    f"context is {self.ranks.longest}: raise model.max_sequence_length, or leave the task out"
                )
            if temperature and (top_p := float(wanted.get("top_p", 1.0))) < 1:
                log.warning("top_p %g of a task is omitted: its answers are sampled by temperature and top_k", top_p)
            of_run = self.ranks.config.generate
            settings = replace(of_run, tokens=tokens, temperature=temperature, top_k=int(wanted.get("top_k", 0)))
            prompts = [self.tok_encode(requests[index].args[0]) for index in indices]
            if cut := sum(len(prompt) > room for prompt in prompts):
                log.warning("%d of %d texts are cut to their last %d tokens", cut, len(prompts), room)
            prompts = [prompt[-room:] for prompt in prompts]
            continued = self.ranks.ask("answer", prompts, settings, self.codec.vocab, {self.eot_token_id})
            for index, ids in zip(indices, continued, strict=True):
                text = self.codec.decode([token for token in ids if token != self.eot_token_id])
                places = [text.find(stop) for stop in wanted["until"] if stop and stop in text]
                answers[index] = text[: min(places, default=len(text))]
        return answers
