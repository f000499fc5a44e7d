"""Tokenizers and chat templates of the forms that published models have, made here: no file is downloaded.

The templates are written for these tests from what the models' own are known to print.
"""

import json
from pathlib import Path
from typing import Any, NamedTuple

import tokenizers
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers

Messages = list[dict[str, Any]]

WORDS = (
    "the quick brown fox jumps over a lazy dog and tells what it has seen: user assistant system model is are two "
    "three question answer why how think Hello world! 12 345 hello there, general."
)


class Family(NamedTuple):
    """A form of templates."""

    template: str
    special: tuple[str, ...]
    """special tokens; the first begins a text, the second ends one"""
    words: tuple[str, ...] = ()
    """added tokens that are not special"""
    is_sentencepiece: bool = False
    """blanks are U+2581"""


LLAMA3 = Family(
    "{{ bos_token }}"
    "{% for message in messages %}"
    "<|start_header_id|>{{ message['role'] }}<|end_header_id|>\n\n"
    "{% if loop.first and message['role'] == 'system' %}Today Date: {{ strftime_now('%d %b %Y') }}\n\n{% endif %}"
    "{{ message['content'] | trim }}<|eot_id|>"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}",
    ("<|begin_of_text|>", "<|eot_id|>", "<|start_header_id|>", "<|end_header_id|>"),
)
QWEN25 = Family(
    "{% if messages[0]['role'] != 'system' %}<|im_start|>system\nYou are helpful.<|im_end|>\n{% endif %}"
    "{% if tools %}<|im_start|>tools\n{{ tools | tojson }}<|im_end|>\n{% endif %}"
    "{% for message in messages %}"
    "<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
)
QWEN3 = Family(
    """{%- set state = namespace(last=0) -%}
{%- for message in messages -%}
    {%- if message.role == 'user' -%}{%- set state.last = loop.index0 -%}{%- endif -%}
{%- endfor -%}
{%- for message in messages -%}
    {%- set content = message.content -%}
    {%- if message.role != 'assistant' -%}
        {{- '<|im_start|>' + message.role + '\\n' + content + '<|im_end|>\\n' -}}
        {%- continue -%}
    {%- endif -%}
    {%- set thinking = '' -%}
    {%- if '</think>' in content -%}
        {%- set thinking = content.split('</think>')[0].split('<think>')[-1].strip('\\n') -%}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') -%}
    {%- endif -%}
    {{- '<|im_start|>assistant\\n' -}}
    {%- if loop.index0 > state.last -%}{{- '<think>\\n' + thinking + '\\n</think>\\n\\n' -}}{%- endif -%}
    {{- content + '<|im_end|>\\n' -}}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|im_start|>assistant\\n' -}}{%- endif -%}
""",
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    words=("<think>", "</think>"),
)
GEMMA = Family(
    """{{ bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {{- raise_exception('System role not supported') }}
{%- endif %}
{%- for message in messages %}
    {%- set role = 'model' if message['role'] == 'assistant' else message['role'] %}
    {{- '<start_of_turn>' + role + '\\n' + message['content'] | trim + '<end_of_turn>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<start_of_turn>model\\n' }}
{%- endif %}""",
    ("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>"),
    is_sentencepiece=True,
)
OLMO2 = Family(
    "{{ bos_token }}{% for message in messages %}"
    "{% if message['role'] == 'assistant' %}"
    "{{ '<|assistant|>\n' + message['content'] + eos_token }}{% if not loop.last %}{{ '\n' }}{% endif %}"
    "{% else %}{{ '<|' + message['role'] + '|>\n' + message['content'] + '\n' }}{% endif %}"
    "{% if loop.last and add_generation_prompt %}{{ '<|assistant|>\n' }}{% endif %}"
    "{% endfor %}",
    ("<|endoftext|>", "<|endoftext|>"),
)
MISTRAL = Family(
    """{%- if messages[0].role == 'system' -%}
    {%- set system = messages[0].content -%}{%- set turns = messages[1:] -%}
{%- else -%}
    {%- set turns = messages -%}
{%- endif -%}
{{- bos_token -}}
{%- for message in turns -%}
    {%- if message.role == 'user' -%}
        {%- if loop.last and system is defined -%}
            {{- '[INST] ' + system + '\\n\\n' + message.content + '[/INST]' -}}
        {%- else -%}
            {{- '[INST] ' + message.content + '[/INST]' -}}
        {%- endif -%}
    {%- else -%}
        {{- ' ' + message.content + eos_token -}}
    {%- endif -%}
{%- endfor -%}""",
    ("<s>", "</s>", "[INST]", "[/INST]"),
    is_sentencepiece=True,
)
R1 = Family(
    "{{ bos_token }}{% for message in messages %}"
    "{% if message.role == 'user' %}<|User|>{{ message.content }}"
    "{% else %}<|Assistant|>{{ message.content.split('</think>')[-1] }}{{ eos_token }}{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}<|Assistant|><think>\n{% endif %}",
    ("<|begin|>", "<|end|>", "<|User|>", "<|Assistant|>"),
    words=("<think>", "</think>"),
)
MARKED = Family(
    """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}{{- message.content + '<|im_end|>' }}{%- endgeneration %}
    {%- else %}
        {{- message.content + '<|im_end|>' }}
    {%- endif %}
    {{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
)
BARE = MARKED._replace(
    template=MARKED.template.replace(
        " + '<|im_end|>' }}{%- endgeneration %}", " }}{%- endgeneration %}{{- '<|im_end|>' }}"
    )
)
"""its blocks end before the token that ends a turn"""

CALLING = Family(
    """{%- for message in messages %}
    {{- '<|im_start|>' + message.role + '\\n' }}
    {%- if message.role == 'assistant' %}
        {%- generation %}
            {{- message.content }}
            {%- for call in message.tool_calls %}
                {{- '<tool_call>\\n' + call.function | tojson + '\\n</tool_call>' }}
            {%- endfor %}
        {%- endgeneration %}
    {%- else %}{{- message.content }}{%- endif %}
    {{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}""",
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
    words=("<tool_call>", "</tool_call>"),
)
"""its blocks may end with an added token that ends no turn"""
PHI = Family(
    "{% for message in messages %}<|{{ message.role }}|>\n{{ message.content }}<|end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>\n{% else %}{{ eos_token }}{% endif %}",
    ("<s>", "<|endoftext|>", "<|end|>", "<|user|>", "<|assistant|>"),
)
"""two tokens stand behind an answer"""
PARTS = Family(
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% for part in message.content %}{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
    ("<|endoftext|>", "<|im_end|>", "<|im_start|>"),
)
"""shows the content only if it is a list"""

FAMILIES = {
    "llama3": LLAMA3,
    "qwen25": QWEN25,
    "qwen3": QWEN3,
    "gemma": GEMMA,
    "olmo2": OLMO2,
    "mistral": MISTRAL,
    "r1": R1,
    "generation": MARKED,
    "bare": BARE,
    "calling": CALLING,
    "phi": PHI,
    "parts": PARTS,
}


def write_tokenizer(folder: Path, family: Family, text: str = WORDS, vocab: int = 400) -> Path:
    """Write tokenizer.json, tokenizer_config.json and chat_template.jinja; return the path of the first."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=family.is_sentencepiece))
    names = [*dict.fromkeys(family.special), *family.words]
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    if family.is_sentencepiece:
        tokenizer.normalizer = normalizers.Replace(" ", "▁")
        tokenizer.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
        tokenizer.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
        alphabet = list("▁\n<>|_[]/")
        names += [f"<0x{byte:02X}>" for byte in range(256)]
    else:
        tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        tokenizer.decoder = decoders.ByteLevel()
    added = [AddedToken(name, normalized=False) for name in names]
    trainer = trainers.BpeTrainer(
        vocab_size=vocab + len(added), special_tokens=added, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([text] * 3, trainer)
    begin, end = family.special[:2]
    # As most tokenizers do, it would put a begin before each text.
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{begin} $A", special_tokens=[(begin, tokenizer.token_to_id(begin))]
    )
    path = folder / "tokenizer.json"
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:  # the trainer has made all of them special
        token["special"] = token["content"] in family.special
    path.write_text(json.dumps(content))
    config = {"bos_token": begin, "eos_token": {"content": end, "__type": "AddedToken"}}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    (folder / "chat_template.jinja").write_text(family.template)
    return path


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: str) -> dict[str, Any]:
    return {"role": "assistant", "content": content}


def system(content: str) -> dict[str, Any]:
    return {"role": "system", "content": content}


TALK = [
    user("why is the fox quick?"),
    assistant("hello there"),
    user("how are two dogs?"),
    assistant("they are lazy: 12"),
]
