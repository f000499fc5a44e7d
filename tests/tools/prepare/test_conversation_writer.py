"""A corpus of conversations: whole examples in sequences of one length, and which of their tokens are trained."""

import json
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch

from tests.tools.prepare.chat.families import QWEN3, QWEN25, Family, Messages, assistant, user, write_tokenizer
from torchllm.config import Data, Finetune, Source
from torchllm.config.errors import DataError
from torchllm.data.checked_file import DamagedFile
from torchllm.data.corpus import Corpus, close_shards
from torchllm.data.corpus_header import corpus_fingerprint
from torchllm.data.packing import IGNORED, PackedBatches, SequencePieces, pack_windows
from torchllm.data.readers import ReaderSettings, open_corpus
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare import conversation_writer
from torchllm.tools.prepare.build import choose_split, write_corpus
from torchllm.tools.prepare.cache import plan_corpus
from torchllm.tools.prepare.chat.plan import chat_format
from torchllm.tools.prepare.chat.template import Conversation
from torchllm.tools.prepare.conversation_writer import ConversationWriter, preparation_day
from torchllm.tools.prepare.counts import describe_corpus
from torchllm.tools.prepare.plan import CorpusPlan
from torchllm.tools.prepare.records import TextRecord

LENGTH = 160
NUMBERS = ["two", "three", "the quick brown fox", "a lazy dog"]


def talk(number: int) -> Messages:
    """One to three turns, of different lengths."""
    messages: Messages = []
    for turn in range(1 + number % 3):
        messages += [user(f"why {number} {NUMBERS[turn]}?"), assistant(f"{NUMBERS[number % 4]} {number}")]
    return messages


TALKS = [talk(number) for number in range(30)]


def write_lines(path: Path, talks: list[Messages], **keys: Any) -> Source:
    path.write_text("".join(json.dumps({"messages": messages} | keys) + "\n" for messages in talks))
    return Source(kind="jsonl", path=str(path), messages_key="messages")


def settings(folder: Path, family: Family = QWEN25, **changed: Any) -> Data:
    tokenizer = str(write_tokenizer(folder, family))
    return Data(tokenizer=tokenizer, document_mask=True, **{"validation_fraction": 0.0} | changed)


def planned(source: Source, data: Data, shard_mib: float = 0.0, length: int = LENGTH) -> CorpusPlan:
    tokenizer = load_tokenizer(data.tokenizer)
    return plan_corpus(source, ReaderSettings(data, tokenizer.vocab, tokenizer, Finetune(), length), shard_mib)


def written(folder: Path, source: Source, data: Data, processes: int = 1, **plan: Any) -> Corpus:
    write_corpus(planned(source, data, **plan), partial(load_tokenizer, data.tokenizer), folder, processes)
    return Corpus(folder)


Tokens = tuple[tuple[int, bool], ...]
"""of an example: ids, and whether they are trained, without what is not trained at the end"""


def tokens_of(ids: Any, is_target: Any) -> Tokens:
    last = int(np.flatnonzero(is_target)[-1])
    return tuple(zip(ids[: last + 1].tolist(), is_target[: last + 1].tolist(), strict=True))


def stored_examples(corpus: Corpus, length: int = LENGTH) -> Counter[Tokens]:
    found: Counter[Tokens] = Counter()
    for number in range(corpus.count("train", length)):
        window = corpus.window("train", number, length)
        assert window.targets is not None
        assert window.begins[-1] == length
        for index in range(len(window.begins) - 1):
            part = slice(window.begins[index], window.begins[index + 1])
            found[tokens_of(window.ids[part], window.targets[part])] += 1
    return found


def direct_examples(source: Source, data: Data, talks: list[Messages], folder: Path) -> Counter[Tokens]:
    """The examples that the conversations become, one by one, cut to LENGTH."""
    chat = planned(source, data).chat
    assert chat is not None
    form = chat_format(data.tokenizer, chat, preparation_day(folder))
    found: Counter[Tokens] = Counter()
    for messages in talks:
        for ids, is_target in form.examples(Conversation(messages)).examples:
            found[tokens_of(ids[:LENGTH], is_target[:LENGTH])] += 1
    return found


def test_sequences_hold_whole_examples(tmp_path: Path) -> None:
    for number, family in enumerate([QWEN25, QWEN3]):
        folder = tmp_path / str(number)
        folder.mkdir()
        data = settings(folder, family)
        source = write_lines(folder / "talks.jsonl", TALKS)
        corpus = written(folder / "corpus", source, data)
        counts = corpus.header.counts
        assert stored_examples(corpus) == direct_examples(source, data, TALKS, folder / "corpus"), family
        sequences = corpus.count("train", LENGTH)
        assert sequences * LENGTH == counts["tokens of examples"] + counts["padding tokens"] == corpus.header.tokens, (
            family
        )
        assert counts["padding tokens"] < 0.2 * corpus.header.tokens, family
        assert counts["conversations"] == 30, family
        first, rules, lengths = describe_corpus(corpus.header)[:3]
        assert f"30 conversations, {counts['examples']} examples" in first, family
        assert rules.startswith("conversations by rule: one example per "), family
        assert lengths.startswith("examples by length: up to 64: "), family


def test_words_of_users_that_are_tokens_of_the_template_are_said_by_name(tmp_path: Path) -> None:
    data = settings(tmp_path, QWEN3)
    source = write_lines(tmp_path / "talks.jsonl", [[user("how? </think>"), assistant("hello")]] * 3)
    header = written(tmp_path / "corpus", source, data).header
    (line,) = [line for line in describe_corpus(header) if "template" in line]
    assert line.startswith("tokens of the chat template in messages that are not the assistant's: </think> 3. ")


def test_a_corpus_does_not_depend_on_its_processes(tmp_path: Path) -> None:
    data = settings(tmp_path)
    source = write_lines(tmp_path / "talks.jsonl", TALKS)
    corpora = []
    for processes in (1, 2):
        corpora.append(written(tmp_path / str(processes), source, data, processes, shard_mib=2e-3))
    assert corpora[0].header.shards > 1
    assert corpora[0].fingerprint == corpora[1].fingerprint
    assert stored_examples(corpora[1]) == direct_examples(source, data, TALKS, tmp_path / "1")


def test_long_examples_are_cut_and_counted(tmp_path: Path) -> None:
    """One is cut within its answer, and of one the sequence length holds no answer; the masks behind them are right."""
    long = "a lazy dog " * 200
    talks = [[user("why?"), assistant(long)], [user(long), assistant("three")], *TALKS[:3]]
    data = settings(tmp_path)
    source = write_lines(tmp_path / "talks.jsonl", talks)
    corpus = written(tmp_path / "corpus", source, data)
    trained = [talks[0], *talks[2:]]
    assert stored_examples(corpus) == direct_examples(source, data, trained, tmp_path / "corpus")
    counts = corpus.header.counts
    assert counts["examples cut to the sequence length"] == 2
    assert counts["examples dropped, for nothing in the sequence length is trained"] == 1
    assert counts["examples"] == 4
    assert "examples cut to the sequence length: 2" in describe_corpus(corpus.header)


def test_a_corpus_of_which_nothing_is_trained_is_an_error(tmp_path: Path) -> None:
    """All answers are cut away, or have weight 0."""
    data = settings(tmp_path)
    for name, question, weight in (("cut", "a lazy dog " * 200, 1), ("weightless", "why?", 0)):
        source = write_lines(tmp_path / f"{name}.jsonl", [[user(question), assistant("two") | {"weight": weight}]] * 3)
        with pytest.raises(
            DataError, match=rf"{name}.jsonl.*: nothing is trained of 3 examples \(examples by length: up to"
        ):
            written(tmp_path / name, source, data)
        assert not (tmp_path / name / "corpus.json").exists()


def test_merged_and_endless_examples_are_counted(tmp_path: Path) -> None:
    colon = QWEN25._replace(
        template="{% for message in messages %}{{ message.role }}: {{ message.content }}{% endfor %}"
        "{% if add_generation_prompt %}assistant: {% endif %}"
    )
    corpus = written(tmp_path / "a", write_lines(tmp_path / "talks.jsonl", TALKS[:3]), settings(tmp_path, colon))
    lines = describe_corpus(corpus.header)
    assert "tokens across the border of a prompt and its answer, which inference never sees: 6" in lines
    assert "examples whose last turn no special token ends, so that the model does not learn to stop: 3" in lines
    harmless = written(tmp_path / "b", write_lines(tmp_path / "talks.jsonl", TALKS[:3]), settings(tmp_path)).header
    assert len(describe_corpus(harmless)) == 3


def test_the_targets_are_a_part_of_the_fingerprint(tmp_path: Path) -> None:
    """The same tokens, of which others are trained, are another corpus; a damaged byte of the targets is found."""
    data = settings(tmp_path)
    source = write_lines(tmp_path / "talks.jsonl", TALKS)
    corpus = written(tmp_path / "a", source, data)
    weighted = [
        [*messages[:-1], messages[-1] | {"weight": 1 - index % 2}] for index, messages in enumerate(TALKS[2::3])
    ]
    one, other = TALKS[2::3], weighted
    prints = []
    for name, talks in (("one", one), ("other", other)):
        made = written(tmp_path / name, write_lines(tmp_path / f"{name}.jsonl", talks), data)
        prints.append((made.fingerprint, made.window("train", 0, LENGTH).ids.tolist()))
    assert prints[0][1] == prints[1][1]
    assert prints[0][0] != prints[1][0]
    path = tmp_path / "a/00000.train.bin"
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(bytes(content))
    close_shards()
    with pytest.raises(DamagedFile, match="do not have their checksum"):
        corpus.verify("train", 0)


def test_of_few_conversations_the_last_ones_are_held_out_whole(tmp_path: Path) -> None:
    for number, family in enumerate((QWEN25, QWEN3)):  # of the second, a conversation is several examples
        folder = tmp_path / str(number)
        folder.mkdir()
        data = settings(folder, family, validation_fraction=0.1)
        source = write_lines(folder / "talks.jsonl", TALKS)
        plan = choose_split(planned(source, data))
        write_corpus(plan, partial(load_tokenizer, data.tokenizer), folder / "corpus")
        corpus = Corpus(folder / "corpus")
        assert stored_examples(corpus) == direct_examples(source, data, TALKS[:-3], folder), number
        assert corpus.count("validation", LENGTH) >= 1, number
    one = write_lines(tmp_path / "one.jsonl", TALKS[:1])
    write_corpus(choose_split(planned(one, data)), partial(load_tokenizer, data.tokenizer), tmp_path / "one")
    assert Corpus(tmp_path / "one").tokens("validation") == 0  # nothing would be left to train on


@pytest.mark.parametrize("together", [4, 10])  # the last group ends with the last example, and before it
def test_the_last_conversations_are_held_out_though_groups_before_them_are_full(
    together: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(conversation_writer, "PACKED_TOGETHER", together)
    data = settings(tmp_path, validation_fraction=0.1)
    talks = [talk(3 * number) for number in range(32)]  # of one example each
    source = write_lines(tmp_path / "talks.jsonl", talks)
    write = ConversationWriter._write_conversation
    most = 0

    def written_and_counted(writer: ConversationWriter, record: TextRecord) -> None:
        nonlocal most
        write(writer, record)
        most = max(most, sum(map(len, writer._waiting.values())) + len(writer._last))

    monkeypatch.setattr(ConversationWriter, "_write_conversation", written_and_counted)
    write_corpus(choose_split(planned(source, data)), partial(load_tokenizer, data.tokenizer), tmp_path / "corpus")
    corpus = Corpus(tmp_path / "corpus")
    assert stored_examples(corpus) == direct_examples(source, data, talks[:-3], tmp_path)
    assert corpus.tokens("validation") > 0
    assert most == together - 1 + 3  # in memory: those that are packed next, and those that may be held out


def test_it_is_tied_to_its_sequence_length_and_to_the_document_mask(tmp_path: Path) -> None:
    data = settings(tmp_path)
    corpus = written(tmp_path / "corpus", write_lines(tmp_path / "talks.jsonl", TALKS), data)
    with pytest.raises(DataError, match=r"packed into sequences of 160 tokens, but training.sequence_length is 128"):
        corpus.count("train", 128)
    assert len({corpus_fingerprint("<u2", "tokenizer", "table", length) for length in (0, 64, 128)}) == 3
    tokens = Source(kind="tokens", path=str(tmp_path / "corpus"))
    tokenizer = load_tokenizer(data.tokenizer)
    reads = ReaderSettings(data, tokenizer.vocab, tokenizer)
    assert open_corpus(tokens.path, reads).count("train", LENGTH)
    with pytest.raises(DataError, match=r"data.document_mask = true"):
        open_corpus(tokens.path, reads._replace(data=replace(data, document_mask=False)))
    with pytest.raises(DataError, match=r"recipes/finetune.py"):
        plan_corpus(
            replace(tokens, kind="jsonl", messages_key="messages"), ReaderSettings(data, tokenizer.vocab, tokenizer)
        )


def test_labels_are_the_targets_on_every_piece_of_a_sequence(tmp_path: Path) -> None:
    """What a rank of cp reads of a sequence is what the whole has there."""
    data = settings(tmp_path)
    corpus = written(tmp_path / "corpus", write_lines(tmp_path / "talks.jsonl", TALKS), data)
    batches = []
    for pieces in (SequencePieces(1, (0,)), SequencePieces(4, (0, 1, 2, 3))):
        parts = pieces.positions(LENGTH)
        windows = []
        for number in range(4):
            read = [range(part.start, part.stop + 2) for part in parts]  # two tokens further ahead
            windows += [corpus.window("train", number, LENGTH, part) for part in read]
        values = torch.from_numpy(pack_windows(windows, True))
        packed = PackedBatches(values, 1, 4, parts, True, has_targets=True, depth=2)
        batches += packed.unpack(torch.device("cpu"))
    whole, cut = batches
    for name in ("tokens", "labels", "positions", "document_ids", "ahead"):
        assert torch.equal(getattr(whole, name), getattr(cut, name)), name
    assert whole.ahead is not None
    for depth, ahead in enumerate((whole.labels, *whole.ahead[:, 1].unbind(1))):
        assert (ahead[:, LENGTH - 1 - depth :] == IGNORED).all()  # the next sequence is of others
    assert whole.document_ids is not None
    for row in range(4):
        window = corpus.window("train", row, LENGTH)
        assert window.targets is not None
        expected = np.where(window.targets, window.ids.astype(np.int64), IGNORED)[1:]
        assert whole.labels[row].tolist() == expected.tolist()
        assert whole.tokens[row].tolist() == window.ids[:-1].tolist()
        assert int((whole.positions[row] == 0).sum()) == len(window.begins) - 1
    assert int((whole.labels != IGNORED).sum()) > 0


def test_bad_conversations_are_named_or_skipped(tmp_path: Path) -> None:
    """Of the form (tests/tools/prepare/chat/test_messages.py), without an answer, and nested too deeply."""
    for number, (record, words) in enumerate(
        [
            ({"text": "a"}, r"wrong key: no 'messages', it has: text \(data.sources.messages_key\)"),
            ({"messages": [user("a")]}, "no message of the assistant"),
            ({"messages": [user("a"), assistant("b") | {"extra": json.loads("[" * 700 + "]" * 700)}]}, "nested too"),
        ]
    ):
        folder = tmp_path / str(number)
        folder.mkdir()
        source = write_lines(folder / "talks.jsonl", TALKS)
        with open(source.path, "a") as file:
            file.write(json.dumps(record) + "\n")
        data = settings(folder)
        with pytest.raises(DataError, match=f"talks.jsonl:31: {words}"):
            written(folder / "corpus", source, data)
        corpus = written(folder / "other", source, replace(data, on_bad_record="skip"))
        assert sum(corpus.header.skipped.values()) == 1, record
        assert corpus.header.counts["conversations"] == 30, record


def test_a_hub_set_is_read_by_its_columns(tmp_path: Path) -> None:
    import datasets

    rows = [{"messages": messages, "tools": [{"name": "fox"}], "other": 1} for messages in TALKS]
    (tmp_path / "set").mkdir()
    datasets.Dataset.from_list(rows).to_parquet(str(tmp_path / "set/train.parquet"))
    data = settings(tmp_path)
    source = Source(kind="hub", path=str(tmp_path / "set"), messages_key="messages")
    corpus = written(tmp_path / "corpus", source, data)
    lines = write_lines(tmp_path / "talks.jsonl", TALKS, tools=[{"name": "fox"}])
    assert stored_examples(corpus) == stored_examples(written(tmp_path / "lines", lines, data))


CALLS = QWEN25._replace(
    template="{{ tools | tojson }}{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content or '' }}"
    "{% for c in m.tool_calls or [] %}{{ c.function | tojson }}{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def calling(number: int, as_text: bool = False) -> dict[str, Any]:
    """A row whose call, and the tool for it, have other keys than those of its neighbors."""
    arguments: Any = [{"city": "Paris"}, {"days": number, "where": {"x": 1}}][number % 2]
    schema = {"type": "object", "properties": {key: {"type": "string"} for key in arguments}}
    if as_text:
        arguments, schema = json.dumps(arguments), json.dumps(schema)
    call = {"type": "function", "function": {"name": "look", "arguments": arguments}}
    tool = {"type": "function", "function": {"name": "look", "parameters": schema}}
    messages = [user(f"why {number}?"), {"role": "assistant", "content": None, "tool_calls": [call]}, assistant("two")]
    return {"messages": messages, "tools": [tool]}


def test_calls_are_the_same_from_lines_tables_and_json_text(tmp_path: Path) -> None:
    """Rows of a table have null for the keys of other rows: these are left out, and counted."""
    data = settings(tmp_path, CALLS)
    rows = [calling(number) for number in range(6)]
    table = pyarrow.Table.from_pylist(rows)
    (tmp_path / "set").mkdir()
    pyarrow.parquet.write_table(table, tmp_path / "set/talks.parquet")
    for name, lines in (("talks", rows), ("text", [calling(number, as_text=True) for number in range(6)])):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {}
    for kind, path in (
        ("jsonl", "talks.jsonl"),
        ("jsonl", "text.jsonl"),
        ("parquet", "set/talks.parquet"),
        ("hub", "set"),
    ):
        source = Source(kind=kind, path=str(tmp_path / path), messages_key="messages")
        corpus = written(tmp_path / "corpora" / path, source, data, length=512)
        found[path] = stored_examples(corpus, 512)
        lines = describe_corpus(corpus.header, in_detail=False)
        assert any(line.endswith("left out of tool calls, tools and other objects: 18") for line in lines) == (
            kind != "jsonl"
        ), path
    assert len(found["talks.jsonl"]) == 6
    assert all(examples == found["talks.jsonl"] for examples in found.values())
