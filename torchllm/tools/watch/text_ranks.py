"""Texts that all ranks rate or continue together, in the layout of a training: rank 0 asks, and the others take part.

Sharded: the texts of a forward pass over the data ranks, and each text over cp; the model as in training.

Sent, besides the messages of forward passes: rank 0's requests as Python objects, and two numbers per text, summed over
all ranks.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from torchllm.config import Config, Generate
from torchllm.config.errors import UserError
from torchllm.data.batch import Batch
from torchllm.data.packing import WHOLE_SEQUENCE
from torchllm.models.decoder import Decoder
from torchllm.models.head import IGNORED
from torchllm.models.layers import widened
from torchllm.parallel.forward_backward import OneStage
from torchllm.parallel.fsdp import free_gathered
from torchllm.parallel.mesh import Mesh, sequence_pieces
from torchllm.runtime.device import compute_dtype
from torchllm.runtime.heartbeat import beat
from torchllm.runtime.signs_of_life import show_progress
from torchllm.runtime.stop import GivenUp, should_give_up
from torchllm.tools.continue_texts import continue_texts, sample_tokens

Scored = tuple[float, bool]
"""log-likelihood of a continuation, and whether each of its tokens is the likeliest"""
CHUNK = 1024
"""tokens whose logits over the whole vocabulary exist at a time"""


class TextRanks:
    """A rank's part. Rank 0 calls `ask` inside of `lead`, while the others `serve`."""

    def __init__(
        self,
        stages: Sequence[Decoder],
        config: Config,
        device: torch.device,
        mesh: Mesh | None = None,
        group: dist.ProcessGroup | None = None,
    ) -> None:
        """stages: of this rank, as `parallelize` returns them. mesh None: this process is alone. group: on the host.

        Raises UserError for a ring that knows no window of a text.
        """
        self.stages, self.config, self.device, self.mesh, self.group = stages, config, device, mesh, group
        self.longest, length = config.longest_text, config.training.sequence_length
        self.is_at_work = False
        """the ranks compute a request of rank 0"""
        self.loss_sum: Callable[[Batch], Tensor] = OneStage(stages, config.parallel).loss_sum
        self.pieces, self.tp, self.data_rank, self.data_size = WHOLE_SEQUENCE, 1, 0, 1
        reach = torch.ones((), dtype=torch.int64, device=device)
        if mesh is not None:
            self.pieces, self.tp = sequence_pieces(mesh), mesh.tp.size()
            self.data_rank, self.data_size = mesh.data_rank, mesh.data_size
            if mesh.pp.size() > 1:
                from torchllm.parallel.pipeline import forward_in_turn

                dtype = compute_dtype(config.training, device)
                self.loss_sum = partial(forward_in_turn, stages, mesh.pp, config.parallel, dtype)
            neighbors = [getattr(module, "neighbors", None) for stage in stages for module in stage.modules()]
            reaches = [of_module.reach for of_module in neighbors if of_module is not None]  # tokens before a piece
            dist.all_reduce(reach.fill_(max(reaches, default=1)), dist.ReduceOp.MAX)
        self.least = self.pieces.total * int(reach)
        """tokens of the shortest text that the ranks of cp can share"""
        # Blocks that are compiled for each length would reach torch's limit of graphs, and those of later stages run
        # uncompiled. FlexAttention keeps its kernel: it would hold all scores without it.
        is_compiled_for_each = bool(config.model.pattern) or config.data.changes_size
        is_eager = is_compiled_for_each and config.model.attention != "flex"
        self.stance: Literal["default", "eager_on_recompile"] = "eager_on_recompile" if is_eager else "default"
        """what happens at a length for which there is no graph"""
        windows = [config.model.of_block(index).window for index in range(config.model.layers)]
        if self.pieces.total > 1 and any(length <= window < self.longest for window in windows):
            raise UserError(
                f"evaluate.tasks: texts of up to {self.longest} tokens (model.max_sequence_length) have a window that "
                f"context parallelism leaves out at training.sequence_length = {length}: train without parallel.cp"
            )

    # -- requests of rank 0

    def ask(self, work: str, *arguments: Any) -> Any:
        """Let all ranks call the method `work`, and return its result."""
        self._from_main((work, arguments))
        self.is_at_work = True
        result = getattr(self, work)(*arguments)
        self.is_at_work = False
        return result

    @contextmanager
    def lead(self) -> Iterator[None]:
        """Return a context for `ask`; when it ends, `serve` ends on the other ranks.

        Not if an error ended a computation of all ranks: they wait in it, or have the same error (GivenUp).
        """
        self.is_at_work = False
        try:
            yield
        finally:
            if not self.is_at_work:
                self._from_main(None)

    def serve(self) -> None:
        """Take part in the requests of rank 0, until its `lead` ends."""
        while (request := self._from_main(None)) is not None:
            work, arguments = request
            getattr(self, work)(*arguments)

    def _from_main(self, request: Any) -> Any:
        """Return the request of rank 0, on all ranks."""
        box = [request]
        if self.group is not None:
            dist.broadcast_object_list(box, src=0, group=self.group)
        return box[0]

    # -- computations of all ranks

    @torch.no_grad()
    def rate(self, texts: Sequence[list[int]], sizes: Sequence[int], vocab: int) -> list[Scored]:
        """Score the last `sizes` tokens of each text, the longest texts first. vocab: ids that were trained.

        A forward pass has as many tokens as a micro batch of the training. Raises GivenUp, on all ranks, as
        `train/evaluate.py` does.
        """
        order = sorted(range(len(texts)), key=lambda index: -len(texts[index]))
        sums = torch.zeros(len(texts), 2, dtype=torch.float64, device=self.device)
        room = self.config.training.micro_batch_size * self.config.training.sequence_length
        start = 0
        try:
            while start < len(order):
                beat("batch")
                show_progress(f"{start:,} of {len(order):,} texts rated".format)
                if should_give_up():
                    raise GivenUp
                length = self._rounded(len(texts[order[start]]) - 1)
                rows = min(max(1, room // length), -(-(len(order) - start) // self.data_size))
                own = order[start : start + rows * self.data_size][self.data_rank :: self.data_size]
                batch = self._batch([(texts[index], sizes[index]) for index in own], rows, length)
                kept = self._keeping(partial(_scores, vocab=vocab))
                with kept as scores, torch.compiler.set_stance(self.stance):
                    self.loss_sum(batch)
                if scores:
                    sums.index_add_(0, self._owners(batch, own), torch.cat(scores).double())
                start += rows * self.data_size
        finally:
            free_gathered(self.stages)
        if self.mesh is not None:
            dist.all_reduce(sums)  # over pp too, where only the last stage has scores; all tp ranks have the same ones
        return [(total / self.tp, missed == 0) for total, missed in sums.tolist()]

    def _rounded(self, length: int) -> int:
        """Return the number of tokens that a text is padded to, so that the ranks of cp and tp can share it."""
        multiple = self.pieces.total * self.tp
        return -(-max(length, self.least) // multiple) * multiple

    def _batch(self, texts: Sequence[tuple[list[int], int]], rows: int, length: int) -> Batch:
        """Return this rank's part of texts whose last tokens are labels, padded behind, where causal attention ends."""
        tokens = torch.zeros(rows, length, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED)
        for row, (text, size) in enumerate(texts):
            ids = torch.tensor(text)
            end = len(text) - 1
            tokens[row, :end] = ids[:-1]
            labels[row, end - size : end] = ids[len(text) - size :]
        own = torch.cat([torch.arange(piece.start, piece.stop) for piece in self.pieces.positions(length)])
        positions = own.clamp(max=self.longest - 1).expand(rows, -1)  # of padding, too, a learned one exists
        tokens, labels, positions = (x.to(self.device) for x in (tokens[:, own], labels[:, own], positions))
        depth = self.config.model.mtp_depth
        ahead = tokens.new_zeros(rows, 2, depth, len(own)) if depth else None
        return Batch(tokens, labels, positions, None, ahead=ahead)

    def _owners(self, batch: Batch, own: Sequence[int]) -> Tensor:
        """Return for each label of a batch of the texts `own` the number of its text."""
        rows = (batch.labels != IGNORED).nonzero()[:, 0]
        return torch.tensor(own, dtype=torch.int64, device=self.device)[rows]

    @contextmanager
    def _keeping(self, of_labels: Callable[[Tensor, Tensor], Tensor]) -> Iterator[list[Tensor]]:
        """Return a context where the head keeps `of_labels` of logits and labels, in place of a loss.

        In chunks, one tensor each. Nothing is kept without a head.
        """
        kept: list[Tensor] = []
        head = next((stage.lm_head for stage in self.stages if stage.lm_head is not None), None)
        if head is None:
            yield kept
            return
        z_loss = head.z_loss

        def keep(logits: Tensor, labels: Tensor) -> Tensor:
            for some_logits, some_labels in zip(logits.split(CHUNK), labels.split(CHUNK), strict=True):
                kept.append(of_labels(some_logits, some_labels))
            return torch.zeros(2 if z_loss else (), device=labels.device)

        plain, head.cross_entropy = head.cross_entropy, keep
        try:
            yield kept
        finally:
            head.cross_entropy = plain

    def answer(
        self, prompts: Sequence[list[int]], settings: Generate, vocab: int, ends: Collection[int]
    ) -> list[list[int]]:
        """Return the ids that follow each prompt, of at most `longest` - `settings.tokens` ids.

        All ranks go on until the texts of all have ended. Raises GivenUp as `rate` does. With pp, cp or tp there is no
        cache: each id takes a forward pass of the whole text.
        """
        parallel = self.config.parallel
        if parallel.pp * parallel.cp * parallel.tp > 1:
            return self._answer_without_cache(prompts, settings, vocab, ends)
        return self._answer_with_cache(prompts, settings, vocab, ends)

    @torch.no_grad()
    def _answer_without_cache(
        self, prompts: Sequence[list[int]], settings: Generate, vocab: int, ends: Collection[int]
    ) -> list[list[int]]:
        texts = [list(prompt) for prompt in prompts]
        shortest_first = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        at_a_time = self.config.training.micro_batch_size * self.data_size
        try:
            for start in range(0, len(texts), at_a_time):
                going = shortest_first[start : start + at_a_time]
                seeds = {index: self.config.run.seed + index for index in going}
                generators = {index: torch.Generator(self.device).manual_seed(seed) for index, seed in seeds.items()}
                for count in range(settings.tokens):
                    beat("batch")
                    show_progress(f"{start:,} of {len(texts):,} texts, {count:,} tokens of the next".format)
                    if should_give_up():
                        raise GivenUp
                    for index, token in self._next_ids(texts, going, settings, vocab, generators).items():
                        texts[index].append(token)
                    going = [index for index in going if texts[index][-1] not in ends]
                    if not going:
                        break
        finally:
            free_gathered(self.stages)
        return [text[len(prompt) :] for text, prompt in zip(texts, prompts, strict=True)]

    def _next_ids(
        self,
        texts: Sequence[list[int]],
        going: Sequence[int],
        settings: Generate,
        vocab: int,
        generators: Mapping[int, torch.Generator],
    ) -> dict[int, int]:
        """Return the id that follows each text of `going`, on all ranks, by a forward pass of all of them."""
        rows = -(-len(going) // self.data_size)
        of_rank = going[self.data_rank :: self.data_size]
        length = self._rounded(max(len(texts[index]) for index in going))
        scored = [([*texts[index], 0], 1) for index in of_rank]  # any label at the last id
        batch = self._batch(scored, rows, length)
        ids = torch.zeros(len(texts), dtype=torch.int64, device=self.device)
        with self._keeping(_logits_of_labels) as logits, torch.compiler.set_stance("force_eager"):  # lengths grow
            self.loss_sum(batch)
        if logits:
            owners = self._owners(batch, of_rank)
            of_owners = [generators[index] for index in owners.tolist()]
            ids[owners] = sample_tokens(torch.cat(logits)[:, :vocab].float(), settings, of_owners)
        if self.mesh is not None:
            dist.all_reduce(ids)  # as in `rate`
        sums = ids.tolist()  # of the equal ids of tp ranks
        return {index: sums[index] // self.tp for index in going}

    def _answer_with_cache(
        self, prompts: Sequence[list[int]], settings: Generate, vocab: int, ends: Collection[int]
    ) -> list[list[int]]:
        """The same number of texts per data rank."""
        order = sorted(range(len(prompts)), key=lambda index: len(prompts[index]))
        each = -(-len(order) // self.data_size)
        own = order[self.data_rank :: self.data_size]
        own += order[:1] * (each - len(own))
        answers: list[list[int]] = []
        size = self.config.training.micro_batch_size
        try:
            for start in range(0, each, size):
                beat("batch")
                if should_give_up():
                    raise GivenUp
                batch = own[start : start + size]
                with torch.compiler.set_stance("force_eager"):  # a cache grows with each token
                    answers += continue_texts(
                        self.stages[0],
                        [prompts[index] for index in batch],
                        settings,
                        vocab=vocab,
                        ends=ends,
                        longest=self.longest,
                        seeds=[self.config.run.seed + index for index in batch],
                        batch_size=size,
                        all_ended=self._all_ended,
                    )
        finally:
            free_gathered(self.stages)
        of_ranks = {self.data_rank: answers}
        if self.mesh is not None:
            gathered: list[Any] = [None] * self.mesh.world.size()
            dist.all_gather_object(gathered, (self.data_rank, answers), group=self.group)
            of_ranks = dict(gathered)
        by_prompt = {index: of_ranks[n % self.data_size][n // self.data_size] for n, index in enumerate(order)}
        return [by_prompt[index] for index in range(len(prompts))]

    def _all_ended(self, has_ended: Tensor) -> bool:
        """Return whether the texts of all ranks have ended. has_ended: (B) of this rank."""
        going = (~has_ended).sum()
        if self.mesh is not None:
            dist.all_reduce(going)
        return not going


def _logits_of_labels(logits: Tensor, labels: Tensor) -> Tensor:
    """Return the logits, (n, V), of the n labels that are not IGNORED. logits: (N, V), under tp sharded over V."""
    chosen = labels != IGNORED
    if not isinstance(logits, DTensor):
        return logits[chosen]
    part, columns = logits.to_local()[chosen], logits.shape[1]
    shape = torch.Size((len(part), columns))
    return DTensor.from_local(
        part, logits.device_mesh, logits.placements, run_check=False, shape=shape, stride=(columns, 1)
    ).full_tensor()


def _scores(logits: Tensor, labels: Tensor, vocab: int) -> Tensor:
    """Return the scores, (n, 2), of the n labels that are not IGNORED.

    Each is its log-probability, and whether another token is likelier, 0 or 1.
    """
    log_probabilities = widened(_logits_of_labels(logits, labels)[:, :vocab]).log_softmax(-1)
    targets = labels[labels != IGNORED]
    misses = log_probabilities.argmax(-1) != targets
    return torch.stack((log_probabilities.gather(1, targets[:, None])[:, 0], misses.to(log_probabilities.dtype)), dim=1)
