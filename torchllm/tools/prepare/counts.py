"""Counts in the header of a corpus: their names, and the lines that a run logs of them."""

import json
from collections import Counter
from collections.abc import Mapping

from torchllm.data.corpus_header import CorpusHeader

CONVERSATIONS = "conversations"
EXAMPLES = "examples"
TARGETS = "trained tokens"
TOKENS = "tokens of examples"
PADDING = "padding tokens"
TRUNCATED = "examples cut to the sequence length"
UNTRAINED = "examples dropped, for nothing in the sequence length is trained"
WORDS = "special tokens in messages, encoded as plain text"
CONTROL = "tokens of the chat template in messages that are not the assistant's: "
MERGED = "tokens across the border of a prompt and its answer, which inference never sees"
ENDLESS = "examples whose last turn no special token ends, so that the model does not learn to stop"
ABSENT = "keys without a value in this row of a table, left out of tool calls, tools and other objects"
RULE = "conversations by rule: "
LENGTH = "examples by length: up to "
UNKNOWN = "unknown tokens"
"""tokens that stand for text that the tokenizer does not know"""
READY = "documents that were token ids already"
ENDED = "of these, documents that end with data.tokenizer's end"
UNDIVIDED = "text files without the delimiter"
_NOTED_UNKNOWN = 0.001
"""smallest share of unknown tokens that is worth a line"""


def describe_corpus(header: CorpusHeader, *, in_detail: bool = True) -> list[str]:
    """Return the lines on the content of a corpus; of text they are few.

    in_detail: with the conversations by rule, and a histogram of the lengths of examples.
    """
    counts = header.counts
    lines = _describe_outcome(counts)
    if in_detail and CONVERSATIONS in counts:
        rules = [f"{name.removeprefix(RULE)} {count:,}" for name, count in counts.items() if name.startswith(RULE)]
        lines[1:1] = [f"{RULE}{', '.join(rules)}", describe_lengths(counts)]
    share = unknown_share(counts, header.tokens)
    if share >= _NOTED_UNKNOWN:
        lines.append(
            f"{share:.1%} of the tokens stand for text that the tokenizer does not know ([UNK]): a model learns "
            "nothing from them; take a tokenizer that was made for this text, or one of bytes"
        )
    if undivided := counts.get(UNDIVIDED, 0):
        delimiter = json.dumps(header.plan["source"]["delimiter"])
        files = header.plan["files"]
        lines.append(
            f"the delimiter {delimiter} is not in {undivided:,} of {files:,} files: each of these is one document"
        )
    return lines


def _describe_outcome(counts: Mapping[str, int]) -> list[str]:
    """Return a line on the conversations of a corpus, and one on each outcome to know of."""
    if READY in counts:
        return [f"{READY}, and are used as they are: {counts[READY]:,}; {ENDED}: {counts.get(ENDED, 0):,}"]
    if CONVERSATIONS not in counts:
        return []
    known = Counter(counts)  # counts of 0 have no key
    trained = known[TARGETS] / max(1, known[TOKENS])
    padding = known[PADDING] / max(1, known[TOKENS] + known[PADDING])
    lines = [
        f"{known[CONVERSATIONS]:,} conversations, {known[EXAMPLES]:,} examples: {trained:.1%} of their tokens are "
        f"trained; {padding:.1%} of the sequences is padding"
    ]
    for name in (TRUNCATED, UNTRAINED, WORDS, MERGED, ENDLESS, ABSENT):
        if known[name]:
            lines.append(f"{name}: {known[name]:,}")
    control = [f"{name.removeprefix(CONTROL)} {count:,}" for name, count in known.items() if name.startswith(CONTROL)]
    if control:
        lines.append(
            f"{CONTROL}{', '.join(control)}. The tokenizer does not call them special, so they are encoded as the "
            'template\'s own. Marks of turns should be plain text, in all messages: set "special" to true for them in '
            "tokenizer.json"
        )
    return lines


def describe_lengths(counts: Mapping[str, int]) -> str:
    lengths = {int(name.removeprefix(LENGTH)): count for name, count in counts.items() if name.startswith(LENGTH)}
    histogram = [f"{length:,}: {lengths[length]:,}" for length in sorted(lengths)]
    return f"{LENGTH}{', '.join(histogram)} tokens"


def untrained(counts: Mapping[str, int]) -> str:
    """Return why nothing of a corpus of conversations is trained; "" if something is, or it is a corpus of text."""
    if not counts.get(UNTRAINED) or counts.get(TARGETS):
        return ""
    return (
        f"nothing is trained of {counts[UNTRAINED]:,} examples ({describe_lengths(counts)}): their answers have "
        "weight 0 or begin behind training.sequence_length. Raise it, or shorten the text before the answers"
    )


def unknown_share(counts: Mapping[str, int], tokens: int) -> float:
    return counts.get(UNKNOWN, 0) / max(1, tokens)
