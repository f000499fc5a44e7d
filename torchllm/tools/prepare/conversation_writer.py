"""Write the shards of a corpus of conversations: examples, packed whole into sequences of one length.

The sequences are fixed here, when the corpus is prepared, so that the n-th sequence of a run is a function of the seed
and n, as it is for text. Examples of one shard share sequences, and none is cut but one that is longer than a sequence.

The header's `counts` count conversations by outcome; their keys are the names below.
"""

import json
from collections import deque
from collections.abc import Iterable, Sequence
from datetime import date
from pathlib import Path
from typing import IO

import numpy as np

from torchllm.data.best_fit import PACKED_TOGETHER, best_fit
from torchllm.data.tokenizer import Tokenizer
from torchllm.runtime.heartbeat import beat
from torchllm.tools.prepare.chat.calls import drop_absent_keys
from torchllm.tools.prepare.chat.examples import ChatFormat, ConversationExamples, Example
from torchllm.tools.prepare.chat.messages import NESTED
from torchllm.tools.prepare.chat.plan import chat_format
from torchllm.tools.prepare.chat.template import Conversation, RefusedConversation
from torchllm.tools.prepare.corpus_writer import ShardFileWriter, first_noted
from torchllm.tools.prepare.counts import (
    ABSENT,
    CONTROL,
    CONVERSATIONS,
    ENDLESS,
    EXAMPLES,
    LENGTH,
    MERGED,
    PADDING,
    RULE,
    TARGETS,
    TOKENS,
    TRUNCATED,
    UNTRAINED,
    WORDS,
)
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.records import TextRecord
from torchllm.tools.prepare.tokenize_shard import UNTOKENIZED, ShardWriter, is_of_tokenizer

DAY_FILE = "prepared_on.txt"
"""of a corpus folder: the first day of its preparation, as 2026-11-23"""
_SHORTEST_LENGTH = 64
"""upper limit of the first bin of lengths that examples are counted in, in tokens"""


def preparation_day(folder: Path) -> date:
    """Return the first day of the preparation of a corpus, which is today if no process has noted one.

    Some templates write the date. So that all processes write the same one, also after an interruption over midnight,
    the first notes it in the folder.
    """
    return date.fromisoformat(first_noted(folder / DAY_FILE, date.today().isoformat))


def make_examples(record: TextRecord, chat: ChatFormat, drops_absent_keys: bool) -> ConversationExamples | TextRecord:
    """Return the examples of a record's conversation, or the record with its fault."""
    try:
        conversation = Conversation(**json.loads(record.text))
        absent_keys = drop_absent_keys(conversation) if drops_absent_keys else 0
        return chat.examples(conversation)._replace(absent_keys=absent_keys)
    except RefusedConversation as refusal:
        return record._replace(fault=refusal.fault, detail=refusal.detail)
    except RecursionError:
        return record._replace(fault=NESTED)
    except BaseException as error:
        if not is_of_tokenizer(error):
            raise
        return record._replace(fault=UNTOKENIZED)


class ConversationWriter(ShardWriter):
    """Turns records into examples and writes them, packed, into the files of their splits."""

    def __init__(self, files: Sequence[IO[bytes]], plan: CorpusPlan, tokenizer: Tokenizer, folder: Path) -> None:
        """Write to `files`, one per split in the order of SPLITS."""
        super().__init__(files, plan, tokenizer, folder)
        assert plan.chat is not None
        self._length = plan.chat.sequence_length
        self._format = chat_format(tokenizer.name, plan.chat, preparation_day(folder), plan.reads_calls)
        self._drops_absent_keys = plan.drops_absent_keys
        self._waiting: dict[ShardFileWriter, list[Example]] = {split: [] for split in self.splits}
        self._conversations = 0
        """that have examples"""
        self._last: deque[list[Example]] = deque()
        """examples of the conversations that are held out if they are the last: fewer than six (`choose_split`)"""

    def write(self, records: Iterable[TextRecord]) -> None:
        """Write records: some thousand examples at a time, the longest first."""
        for record in records:
            beat("tokenizing")
            if record.fault:
                self.skip(record)
            else:
                self._write_conversation(record)

    def finish(self) -> None:
        """Write the last examples, and the rest of each file."""
        self.tally.finish()
        if self._plan.last_tokens:
            self.hold_out_last()
        for split in self.splits:
            self._pack(split)
            split.finish()

    def hold_out_last(self) -> None:
        """Give the last conversations of the shard, one at least, to the validation split, unless they are all."""
        train, validation = self.splits
        for examples in self._last:
            self._wait(validation if len(self._last) < self._conversations else train, examples)

    def _write_conversation(self, record: TextRecord) -> None:
        """Count a conversation, and keep its examples until there are enough to pack."""
        made = make_examples(record, self._format, self._drops_absent_keys)
        if isinstance(made, TextRecord):
            self.skip(made)
            return
        for example in made.examples:
            if self.over_vocab(example.ids):
                self.skip_over_vocab(record, example.ids)
                return
        self.tally.good(record)
        self.counts[CONVERSATIONS] += 1
        self.counts[RULE + made.rule] += 1
        self.counts[WORDS] += made.words_as_text
        self.counts[MERGED] += made.merged_tokens
        self.counts[ENDLESS] += made.without_end
        self.counts.update(CONTROL + word for word in made.control_words)
        self.counts[ABSENT] += made.absent_keys
        self.text_bytes += record.size
        split = self.split_of(record)
        kept = [example for example in map(self._cut, made.examples) if example is not None]
        if not kept:
            return
        self._conversations += 1
        self._last.append(kept)
        held_out = max(1, round(self._conversations * self._plan.validation_fraction)) if self._plan.last_tokens else 0
        if len(self._last) > held_out:
            self._wait(split, self._last.popleft())

    def _wait(self, split: ShardFileWriter, examples: Sequence[Example]) -> None:
        """Keep examples until there are enough to pack."""
        self._waiting[split] += examples
        if len(self._waiting[split]) >= PACKED_TOGETHER:
            self._pack(split)

    def _cut(self, example: Example) -> Example | None:
        """Count an example and return it, cut to the sequence length; None if nothing of it is trained."""
        power_of_two = 1 << (len(example.ids) - 1).bit_length()
        self.counts[f"{LENGTH}{max(_SHORTEST_LENGTH, power_of_two)}"] += 1
        if len(example.ids) > self._length:
            self.counts[TRUNCATED] += 1
            example = Example(example.ids[: self._length], example.is_target[: self._length])
        targets = int(example.is_target.sum())
        if not targets:
            self.counts[UNTRAINED] += 1
            return None
        self.counts[EXAMPLES] += 1
        self.counts[TARGETS] += targets
        self.counts[TOKENS] += len(example.ids)
        self.count_unknown(example.ids)
        return example

    def _pack(self, split: ShardFileWriter) -> None:
        """Write the examples that wait."""
        examples = self._waiting[split]
        for numbers in best_fit([len(example.ids) for example in examples], self._length):
            room = self._length
            for number in numbers:
                ids, is_target = examples[number]
                split.add(ids)
                split.add_targets(is_target)
                room -= len(ids)
            split.extend(np.full(room, self.tokenizer.end))  # behind an example nothing attends to it
            split.add_targets(np.zeros(room, dtype=np.bool_))
            self.counts[PADDING] += room
        examples.clear()
