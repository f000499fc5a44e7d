"""Tokenizers of a run as files of transformers: the same ids, or none."""

import itertools
import json
from pathlib import Path
from typing import Any

import transformers

from tests.tools.prepare.chat.families import LLAMA3 as LLAMA
from tests.tools.prepare.chat.families import QWEN25
from tests.tools.prepare.chat.families import write_tokenizer as write_family
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.prepare.tokenizer_json import write_tokenizer

TEXT = "The cat's hat, 12345 thethe!\n\n\n  and  the\tend \n naïve 🙂"


def test_bytes_become_a_tokenizer_with_the_same_ids(tmp_path: Path) -> None:
    tokenizer = load_tokenizer("bytes")
    write_tokenizer(tokenizer, tmp_path, 64)
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for text in (TEXT, "", " ", "".join(map(chr, range(0x250)))):
        (ids,) = tokenizer.encode_documents([text])
        assert theirs(text).input_ids == [tokenizer.begin, *ids.tolist()], text
        assert theirs.decode(ids.tolist()) == text
    assert (theirs.eos_token_id, theirs.model_max_length) == (tokenizer.end, 64)


def test_a_tokenizer_json_is_copied_with_its_template_and_its_names(tmp_path: Path) -> None:
    source = write_family(tmp_path / "source", QWEN25)
    names = {"bos_token": "<|endoftext|>", "eos_token": "<|im_end|>", "unk_token": {"content": "<|im_start|>"}}
    config = names | {"pad_token": "[PAD]", "padding_side": "left", "chat_template": "b", "model_max_length": 32}
    source.with_name("tokenizer_config.json").write_text(json.dumps(config))
    source.with_name("special_tokens_map.json").write_text("{}")
    out = tmp_path / "out"
    out.mkdir()
    write_tokenizer(load_tokenizer(str(source)), out, 64)
    files = ("chat_template.jinja", "tokenizer.json", "tokenizer_config.json")
    assert sorted(path.name for path in out.iterdir()) == list(files)
    for name in files[:2]:
        assert (out / name).read_bytes() == source.with_name(name).read_bytes()
    written = json.loads((out / files[2]).read_text())
    assert [written[name] for name in names] == ["<|endoftext|>", "<|im_end|>", "<|im_start|>"]
    assert (written["padding_side"], written["chat_template"], written["model_max_length"]) == ("left", "b", 64)
    assert "pad_token" not in written  # tokenizer.json has none: transformers would give it an id that no model has


ADDED = {"content": "fox", "lstrip": True, "rstrip": True, "normalized": False, "single_word": False, "special": False}
FOREIGN = {
    "tokenizer_class": "LlamaTokenizerFast",
    "add_bos_token": True,
    "add_eos_token": True,
    "add_prefix_space": True,
    "fix_mistral_regex": True,
    "legacy": False,
    "added_tokens_decoder": {"7": ADDED},
    "auto_map": {"AutoTokenizer": ["mine.Slow", None]},
    "model_input_names": ["input_ids", "token_type_ids"],
}
CONFIGS: dict[str, dict[str, Any] | None] = {
    "none": None,
    "without a class": {},
    "of transformers 5": {"tokenizer_class": "TokenizersBackend"},
    "foreign": FOREIGN,
}
ENDS = ("<|begin_of_text|>", "<|end_of_text|>")
SAME_IN_BOTH = {
    "tokenizer_class",
    *("bos_token", "eos_token"),
    *("model_input_names", "add_prefix_space", "clean_up_tokenization_spaces", "model_max_length"),
}
"""keys that transformers 4.57.6 and 5.24 read in the same way, with these values: ids of 200 texts were compared"""


def test_transformers_4_and_5_read_a_tokenizer_json_as_a_run_does(tmp_path: Path) -> None:
    """Nothing but these keys is left, whatever stood there; that transformers 5 gives the ids is tried here."""
    for (name, config), prefix in itertools.product(CONFIGS.items(), (False, True)):
        source = write_family(tmp_path / f"{name} {prefix}", LLAMA._replace(special=ENDS))
        content = json.loads(source.read_text())
        content["pre_tokenizer"]["add_prefix_space"] = prefix
        source.write_text(json.dumps(content))
        source.with_name("tokenizer_config.json").unlink()
        if config is not None:
            names = dict(zip(("bos_token", "eos_token"), ENDS, strict=True))
            source.with_name("tokenizer_config.json").write_text(json.dumps(config | names))
        source.with_name("special_tokens_map.json").write_text('{"unk_token": "fox"}')
        out = source.parent / "out"
        out.mkdir()
        tokenizer = load_tokenizer(str(source))
        write_tokenizer(tokenizer, out, 64)
        written = json.loads((out / "tokenizer_config.json").read_text())
        assert set(written) == SAME_IN_BOTH, name
        assert written["tokenizer_class"] == "PreTrainedTokenizerFast", name
        assert written["model_input_names"] == ["input_ids", "attention_mask"], name
        assert written["add_prefix_space"] is prefix, name  # transformers 4 sets that of tokenizer.json to it
        assert (written["bos_token"], written["eos_token"]) == ENDS, name
        (out / "config.json").write_text('{"model_type": "llama"}')
        theirs = transformers.AutoTokenizer.from_pretrained(out)
        texts = ["the quick brown fox", " a  fox\n\n", "Ünïcode 🙂 fox's 12", ""]
        for text, ids in zip(texts, tokenizer.encode_documents(texts), strict=True):
            assert theirs(text).input_ids == [tokenizer.begin, *ids.tolist()], (name, text)
