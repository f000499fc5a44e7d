"""The inputs that decide the content of a corpus."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Literal

from torchllm.config import Source
from torchllm.data.tokenizer import Tokenizer
from torchllm.tools.prepare.source_files import SourceFile

if TYPE_CHECKING:  # most text has none
    from torchllm.tools.prepare.chat.plan import ChatPlan
    from torchllm.tools.prepare.fill_in_the_middle import FillInTheMiddle

LoadTokenizer = Callable[[], Tokenizer]
"""a call of `load_tokenizer` that can be sent to other processes, which a tokenizer cannot"""
_KEY_FORMAT = 2
"""in the hash since its fields were named; a corpus of format 3 has the key that it had in format 2"""
_LATER_SOURCE_FIELDS = ("messages_key", "delimiter", "subset", "revision", "max_epochs")
"""keys of a source that are in the hash only where they are set, as before they were added"""
_TABLES = ("parquet", "hub")
"""kinds of sources whose rows share one struct"""


@dataclass(frozen=True)
class CorpusPlan:
    """All inputs that decide the content of a corpus. The key of a cached corpus is a hash of these fields."""

    source: Source
    """a data set of the hub has its commit as revision"""
    files: list[SourceFile]
    tokenizer: str
    """fingerprint of the tokenizer"""
    vocab: int
    """token ids must be under this"""
    validation_fraction: float
    on_bad_record: Literal["error", "skip"]
    shard_mib: float
    """approximate size of the part of the source that becomes a shard, in MiB; 0: see `build.shard_size_mib`"""
    revision: str = ""
    """of a folder that stands for a data set of the hub (see `sources.hub_folder_version`)"""
    chat: "ChatPlan | None" = None
    """how conversations are written; None: the source is text"""
    held_out: int = 0
    """number of `files`, at the end, that are the validation split; 0: a share of the documents of all files is"""
    last_tokens: bool = False
    """the last tokens of each shard (of conversations: the last ones) are the validation split (see `choose_split`)"""
    reads_calls: bool = False
    """whether tool calls and tools become objects with the keys of their row (see `chat.calls`); not where the chat
    template writes neither"""

    fim: "FillInTheMiddle | None" = None
    """None: documents are written as they are"""

    @property
    def drops_absent_keys(self) -> bool:
        """Whether an object of a row has null for keys that only other rows have, and loses them."""
        return self.reads_calls and self.source.kind in _TABLES

    @cached_property
    def key(self) -> str:
        """Return a hash of the plan. It takes 1 s for 100,000 files, so it is computed once."""
        fields = asdict(self)
        if not self.revision:
            del fields["revision"]  # other sources have the key that they had before this field was added
        if self.chat is None:
            del fields["chat"]  # as above
        for name in ("held_out", "last_tokens", "reads_calls", "fim"):
            if not fields[name]:
                del fields[name]  # as above
        for name in _LATER_SOURCE_FIELDS:
            if not fields["source"][name]:
                del fields["source"][name]
        return hashlib.sha256(json.dumps([_KEY_FORMAT, fields]).encode()).hexdigest()[:16]

    @property
    def keys(self) -> list[str]:
        """Return the keys of both ways to hold out documents."""
        return [self.key, replace(self, last_tokens=not self.last_tokens).key]


def may_write_calls(template: str) -> bool:
    """Return whether a chat template may write tool calls or tools."""
    return any(word in template for word in ("tool", "function", "tojson"))
