"""Which tokens of a conversation are trained: the assistant's, each with the context that it has at inference.

A conversation becomes one example, or several, by the first of these rules that holds:

1. the template marks the text that the model generates, by `{% generation %}` blocks: these are trained;
2. each turn of the assistant, rendered with the turns before it, is a prefix of the whole conversation, and begins with
   the prompt that the template makes for it: one example, with all turns after these prompts trained (Llama 3,
   Qwen2.5, Gemma, OLMo 2);
3. else, as the template renders earlier turns in another way (Qwen3 leaves out their thinking), one example per turn of
   the assistant: the conversation up to it, with only that turn trained;
4. where a turn does not even begin with its prompt (DeepSeek-R1, Mistral with a system message), the trained text
   would never be seen at inference: an error.

The token that ends a turn is trained, so that the model learns to stop; blanks that the template writes after it are
not. `ChatFormat.ends_of_turn` says which tokens end a turn: training, generation and export ask it.
"""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from torchllm.data.tokenizer import Ids
from torchllm.tools.prepare.chat.calls import with_objects
from torchllm.tools.prepare.chat.encoder import ChatEncoder, is_inside
from torchllm.tools.prepare.chat.marks import (
    RenderedChat,
    TextSpan,
    has_marks,
    mark_words,
    read_marks,
    special_pattern,
)
from torchllm.tools.prepare.chat.template import (
    ANSWER,
    QUESTION_AND_ANSWER,
    ChatTemplate,
    Conversation,
    Message,
    RefusedConversation,
)

Rule = Literal["generation blocks", "one example per conversation", "one example per turn"]

_BLANKS = re.compile(r"\s*")

NO_PROMPT = "a turn of the assistant does not begin with its prompt"
_SHOWN = 24
"""characters of a text that an error shows on each side of a place"""


class TrainedText(NamedTuple):
    """A text, and the parts of it that are trained."""

    chat: RenderedChat
    trained: list[TextSpan]


class Example(NamedTuple):
    """Tokens that are trained together: they attend to each other, and to no others."""

    ids: Ids
    is_target: npt.NDArray[np.bool_]
    """(tokens,): the model is trained to predict this token"""


class ConversationExamples(NamedTuple):
    examples: list[Example]
    rule: Rule
    words_as_text: int
    """words of messages that look like special tokens, and are encoded as plain text"""
    merged_tokens: int
    """tokens that hold the end of a prompt and the beginning of its answer, which inference never sees"""
    without_end: int
    """examples whose last turn no special token ends"""
    control_words: list[str]
    """words of a user, a tool or a system message that are tokens of the template, which are not special"""
    absent_keys: int = 0
    """keys that the conversation has lost (see `calls.drop_absent_keys`)"""


@dataclass(frozen=True)
class ChatFormat:
    """A tokenizer and a chat template: how conversations are written as tokens."""

    encoder: ChatEncoder
    template: ChatTemplate
    reads_calls: bool = True
    """whether JSON text in calls and tools is read (see `calls.with_objects`)"""

    def examples(self, conversation: Conversation) -> ConversationExamples:
        """Return the examples of a conversation. Raises RefusedConversation."""
        turns = [index for index, message in enumerate(conversation.messages) if message.get("role") == "assistant"]
        if not turns:
            raise RefusedConversation("no message of the assistant")
        last = turns[-1]  # nothing is trained after it
        conversation = conversation._replace(messages=conversation.messages[: last + 1])
        messages, tools = self._marked(conversation)
        rule, texts = self._trained_texts(messages, tools, turns)
        examples, merged = [], 0
        for text, encoded in zip(texts, self.encoder.encode([text.chat for text in texts]), strict=True):
            is_target = encoded.inside(text.trained)
            is_target[:1] = False  # nothing stands before it
            merged += encoded.across([span.start for span in text.trained])
            examples.append(Example(encoded.ids, is_target))
        words_as_text = sum(len(text.chat.plain) for text in texts)
        without_end = sum(not self._has_end(text) for text in texts)
        return ConversationExamples(
            examples, rule, words_as_text, merged, without_end, self._control_words(conversation)
        )

    def prompt(self, conversation: Conversation) -> Ids:
        """Return the tokens of a conversation up to where the assistant answers. Raises RefusedConversation."""
        messages, tools = self._marked(conversation)
        (encoded,) = self.encoder.encode([read_marks(self.template.render(messages, tools, True))])
        return encoded.ids

    def _marked(self, conversation: Conversation) -> Conversation:
        """Return a conversation for the template: words that look like special tokens are between marks.

        Raises RefusedConversation.
        """
        if self.reads_calls:
            conversation = with_objects(conversation, self.template)
        if has_marks(conversation):
            raise RefusedConversation("reserved character", " (private use, from U+10FFF0 to U+10FFF4)")
        special = self.encoder.special_pattern
        return Conversation(mark_words(conversation.messages, special), mark_words(conversation.tools, special))

    def _control_words(self, conversation: Conversation) -> list[str]:
        """Return the words of tools and of all messages but the assistant's that `_control_pattern` matches."""
        others = [message for message in conversation.messages if message.get("role") != "assistant"]
        return self._control_pattern.findall(json.dumps([others, conversation.tools], ensure_ascii=False))

    @cached_property
    def _control_pattern(self) -> re.Pattern[str]:
        """A pattern of the added tokens that the template writes and the tokenizer does not call special.

        The assistant may write them in its text (`<think>`); transformers' sanitize_control_tokens has the same ones.
        """
        source = self.template.source
        return special_pattern([token for token in self.encoder.not_special if token.strip() and token in source])

    @cached_property
    def ends_of_turn(self) -> dict[str, int]:
        """The added tokens that the template writes after an answer, in their order, and their ids.

        There are none if the template ends no turn by a token, or refuses a conversation of a question and an answer.
        """
        try:
            text = read_marks(self.template.render(QUESTION_AND_ANSWER, None)).text
            header = self._header_tokens(QUESTION_AND_ANSWER, None, 1)
        except RefusedConversation:
            return {}
        ends = {}
        for token in self.encoder.added_pattern.findall(text.rpartition(ANSWER)[2]):
            token_id = self.encoder.token_id(token)
            if token not in header and token_id is not None:
                ends[token] = token_id
        return ends

    def _trained_texts(
        self, messages: list[Message], tools: list[Any] | None, turns: Sequence[int]
    ) -> tuple[Rule, list[TrainedText]]:
        """Return the texts of a conversation by the first rule that holds. turns: the assistant's messages."""
        whole = read_marks(self.template.render(messages, tools))
        if whole.generated:
            return "generation blocks", [self._by_blocks(whole, messages, tools, turns)]
        prompts, ends = [], []
        for turn in turns:
            prompts.append(read_marks(self.template.render(messages[:turn], tools, add_generation_prompt=True)))
            ends.append(read_marks(self.template.render(messages[: turn + 1], tools)))
        for prompt, end in zip(prompts, ends, strict=True):
            if not end.text.startswith(prompt.text):
                raise RefusedConversation(NO_PROMPT, _describe_difference(prompt.text, end.text))
        spans = [self._turn(end, len(prompt.text)) for prompt, end in zip(prompts, ends, strict=True)]
        is_trained = [_is_trained(messages[turn]) for turn in turns]
        if all(whole.text.startswith(end.text) for end in ends):
            trained = [span for span, wanted in zip(spans, is_trained, strict=True) if wanted]
            return "one example per conversation", [TrainedText(whole, trained)]
        texts = [TrainedText(end, [span]) for end, span, wanted in zip(ends, spans, is_trained, strict=True) if wanted]
        return "one example per turn", texts

    def _by_blocks(
        self, whole: RenderedChat, messages: list[Message], tools: list[Any] | None, turns: Sequence[int]
    ) -> TrainedText:
        """Return the text of a template with generation blocks, and the blocks of the turns that are trained."""
        is_trained = [_is_trained(messages[turn]) for turn in turns]
        blocks = list(whole.generated)
        if not all(is_trained):
            if len(blocks) != len(turns):
                detail = f": the template has {len(blocks)} of them for {len(turns)} messages of the assistant"
                raise RefusedConversation("weight 0 without a generation block", detail)
            blocks = [block for block, wanted in zip(blocks, is_trained, strict=True) if wanted]
        header = self._header_tokens(messages, tools, turns[0])
        return TrainedText(whole, [self._with_end_of_turn(whole, block, header) for block in blocks])

    def _header_tokens(self, messages: list[Message], tools: list[Any] | None, turn: int) -> set[str]:
        """Return the added tokens that the template writes before a turn of the assistant."""
        before = read_marks(self.template.render(messages[:turn], tools)).text
        prompt = read_marks(self.template.render(messages[:turn], tools, add_generation_prompt=True)).text
        is_same = [one == other for one, other in zip(before, prompt, strict=False)]
        start = is_same.index(False) if False in is_same else len(is_same)
        return {token.group() for token in self.encoder.added_pattern.finditer(prompt) if token.end() > start}

    def _with_end_of_turn(self, chat: RenderedChat, block: TextSpan, header: set[str]) -> TextSpan:
        """Return a generation block with the token that ends its turn, which may be after it.

        The last token of the block need not end the turn: `</tool_call>` does not, and a word of the message may look
        like such a token.
        """
        following = self._token_behind(chat, block.end)
        if following is None:
            return block
        ends_turn = following.group() in self.ends_of_turn
        last = self._last_token(chat, block)
        if not ends_turn and (last is None or last.group() not in self.ends_of_turn):  # its end may be of another kind
            ends_turn = following.group() in self.encoder.special and following.group() not in header
        return TextSpan(block.start, following.end()) if ends_turn else block

    def _turn(self, end: RenderedChat, start: int) -> TextSpan:
        """Return the trained part of a turn that begins at `start`: all, or up to its last added token."""
        turn = TextSpan(start, len(end.text))
        last = self._last_token(end, turn)
        return turn if last is None else TextSpan(start, last.end())

    def _token_behind(self, chat: RenderedChat, start: int) -> re.Match[str] | None:
        """Return the added token of the template that follows, perhaps after blanks; None if there is none."""
        blanks = _BLANKS.match(chat.text, start)
        assert blanks is not None
        token = self.encoder.added_pattern.match(chat.text, blanks.end())
        return None if token is None or is_inside(token, chat.plain) else token

    def _last_token(self, chat: RenderedChat, span: TextSpan) -> re.Match[str] | None:
        """Return the added token of the template at the end of a part of the text, ignoring final blanks."""
        tokens = list(self.encoder.added_pattern.finditer(chat.text, span.start, span.end))
        if not tokens or chat.text[tokens[-1].end() : span.end].strip() or is_inside(tokens[-1], chat.plain):
            return None
        return tokens[-1]

    def _has_end(self, text: TrainedText) -> bool:
        """Return whether a special token, or another one that ends a turn, is the last that is trained of a text."""
        if not text.trained:
            return True
        last = self._last_token(text.chat, text.trained[-1])
        return last is not None and last.group() in {*self.encoder.special, *self.ends_of_turn}


def _describe_difference(prompt: str, turn: str) -> str:
    """Return where the text up to a turn of the assistant is not as its prompt, and why that is."""
    is_same = [one == other for one, other in zip(prompt, turn, strict=False)]
    place = is_same.index(False) if False in is_same else len(is_same)
    shown = [repr(text[max(0, place - _SHOWN) : place + _SHOWN]) for text in (prompt, turn)]
    reason = "the chat template moves a system message or leaves out thinking"
    if turn[place:].lstrip("\n").startswith(prompt[place:].lstrip("\n")):
        reason = "a line end is missing in one of them, as Jinja drops the one behind a tag %}: write it as {{ '\\n' }}"
    return (
        f": the prompt has {shown[0]} where the turn has {shown[1]}, and the trained text would never be seen at "
        f"inference. Most likely {reason}. Name a template that does not, finetune.chat_template = FILE"
    )


def _is_trained(message: Message) -> bool:
    """Return whether a turn of the assistant is trained: all are but those with "weight": 0, as in OpenAI's form."""
    return bool(message.get("weight", 1) != 0)
