"""What an export says of the texts of its model, read by transformers: begin, ends, chat template."""

import json
from dataclasses import asdict
from datetime import date
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from tests.recipes.saved_run import NO_LORA, SIZES, save_run
from tests.tools.hub.published import save_published
from tests.tools.prepare.chat.families import FAMILIES, QWEN25, TALK, Family, system, user, write_tokenizer
from torchllm.config import Config, Finetune, Model
from torchllm.config.schema import Lora
from torchllm.data.tokenizer import load_tokenizer
from torchllm.tools.front.resolve import load_run
from torchllm.tools.hub.export import export_adapter, export_model
from torchllm.tools.hub.families.qwen2 import QWEN2
from torchllm.tools.hub.files import read_hub_config
from torchllm.tools.prepare.chat.examples import ChatFormat
from torchllm.tools.prepare.chat.plan import ChatPlan, chat_format, plan_chat
from torchllm.tools.prepare.chat.template import Conversation

OLD = "OLD {{ messages[-1].content }}"
PUBLISHED = {"from": "", "model_type": "llama", "vocab": 0}


def save_chat_run(
    folder: Path,
    tokenizer: Path,
    chat: ChatPlan | None,
    record: dict[str, Any] | None = None,
    lora: Lora = NO_LORA,
) -> Config:
    """Write a run of a tokenizer, whose checkpoint says how its conversations were written; return its config."""
    sizes: dict[str, Any] = SIZES | {"vocab": load_tokenizer(str(tokenizer)).vocab}
    state = {} if chat is None else {"chat": asdict(chat)}
    save_run(folder, Model(**sizes), record=record, lora=lora, state=state)
    return load_run([str(folder / "config.toml"), f"--data.tokenizer={tokenizer}"], one_device=True)


def format_of(tokenizer: Path, plan: ChatPlan) -> ChatFormat:
    return chat_format(str(tokenizer), plan, date.today())


def ends_of(folder: Path) -> list[int]:
    """The ids that end a text by both files, which say the same."""
    listed = []
    for name in ("config.json", "generation_config.json"):
        ends = json.loads((folder / name).read_text())["eos_token_id"]
        listed.append(ends if isinstance(ends, list) else [ends])
    assert listed[0] == listed[1]
    return listed[0]


AT_NIGHT = [pytest.param(name, marks=pytest.mark.exhaustive) for name in ("qwen25", "gemma", "olmo2")]


@pytest.mark.parametrize("name", ["llama3", "mistral", "phi", "parts", *AT_NIGHT])
def test_a_chat_has_the_ids_that_were_trained_and_ends_as_they_did(name: str, tmp_path: Path) -> None:
    """The template is the run's, not the one beside the tokenizer, and not the file of which it came."""
    family = FAMILIES[name]
    tokenizer = write_tokenizer(tmp_path, family)
    plan = plan_chat(str(tokenizer), Finetune(), 64)
    (tmp_path / "chat_template.jinja").write_text(OLD)
    config = save_chat_run(tmp_path / "run", tokenizer, plan)
    folder = export_model(config, tmp_path / "out").folder

    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    own = format_of(tokenizer, plan)
    (example,) = own.examples(Conversation(TALK[:2])).examples
    trained, asked = TALK[:2], TALK[:3]
    if name == "parts":
        trained, asked = in_parts(trained), in_parts(asked)
    assert theirs.apply_chat_template(trained, tokenize=True, return_dict=False) == example.ids.tolist()
    prompt = theirs.apply_chat_template(asked, tokenize=True, return_dict=False, add_generation_prompt=True)
    assert prompt == own.prompt(Conversation(TALK[:3])).tolist()
    assert json.loads((folder / "tokenizer_config.json").read_text())["chat_template"] == family.template
    assert ends_of(folder)[: len(own.ends_of_turn)] == list(own.ends_of_turn.values())
    assert load_tokenizer(str(tokenizer)).end in ends_of(folder)
    assert read_hub_config(folder).model.vocab == config.model.vocab
    if name == "llama3":  # whose template writes the date: of the day on which it is used, as a published one does
        text = theirs.apply_chat_template([system("a"), user("b")], tokenize=False)
        assert f"Today Date: {date.today().strftime('%d %b')}" in str(text)


def test_an_adapter_says_of_its_texts_what_a_model_does(tmp_path: Path) -> None:
    tokenizer = write_tokenizer(tmp_path, QWEN25)
    plan = plan_chat(str(tokenizer), Finetune(), 64)
    (tmp_path / "chat_template.jinja").write_text(OLD)
    config = save_chat_run(tmp_path / "run", tokenizer, plan, lora=Lora(rank=2))
    folder = export_adapter(config, tmp_path / "adapter").folder
    whole = export_model(config, tmp_path / "merged").folder
    texts = {"chat_template.jinja", "generation_config.json", "tokenizer.json", "tokenizer_config.json"}
    of_peft = {"README.md", "adapter_config.json", "adapter_model.safetensors"}
    assert {path.name for path in folder.iterdir()} == texts | of_peft
    assert all((folder / name).read_bytes() == (whole / name).read_bytes() for name in texts)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    (example,) = format_of(tokenizer, plan).examples(Conversation(TALK)).examples
    assert theirs.apply_chat_template(TALK, tokenize=True, return_dict=False) == example.ids.tolist()
    generation = transformers.GenerationConfig.from_pretrained(folder)
    assert generation.eos_token_id == theirs.convert_tokens_to_ids("<|im_end|>")


def in_parts(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [message | {"content": [{"type": "text", "text": message["content"]}]} for message in messages]


def test_a_generation_stops_at_the_end_of_a_turn(tmp_path: Path) -> None:
    """transformers writes on until a token of which the exported folder says that it ends a text."""
    tokenizer = write_tokenizer(tmp_path, QWEN25._replace(special=("<|im_start|>", "<|endoftext|>", "<|im_end|>")))
    plan = plan_chat(str(tokenizer), Finetune(), 64)
    folder = export_model(save_chat_run(tmp_path / "run", tokenizer, plan), tmp_path / "out").folder
    model = transformers.AutoModelForCausalLM.from_pretrained(folder)
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    prompt = theirs.apply_chat_template(TALK[:1], add_generation_prompt=True, return_tensors="pt", return_dict=False)
    for end in ("<|im_end|>", "<|endoftext|>"):
        wanted = theirs.convert_tokens_to_ids(end)

        def write(tokens: Tensor, scores: Tensor, wanted: int = wanted) -> Tensor:
            """The fourth token is the end; before it, and would it go on, any other."""
            written = tokens.shape[1] - prompt.shape[1]
            return torch.full_like(scores, -9.0).index_fill_(1, torch.tensor([wanted if written == 3 else 300]), 9.0)

        answer = model.generate(prompt, do_sample=False, max_new_tokens=9, logits_processor=[write])
        assert answer[0, prompt.shape[1] :].tolist() == [300, 300, 300, wanted]


def test_a_tokenizer_that_transformers_5_reads_otherwise_is_told(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """AutoTokenizer has one pattern for all models of the family qwen2."""
    for name, pattern, is_told in (("own", "x", True), ("qwen", QWEN2.tokenizer_pattern, False)):
        tokenizer = write_tokenizer(tmp_path / name, QWEN25)
        content = json.loads(tokenizer.read_text())
        split = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
        byte_level = content["pre_tokenizer"] | {"use_regex": False}
        content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, byte_level]}
        tokenizer.write_text(json.dumps(content | {"normalizer": {"type": "NFC"}}))
        sizes: dict[str, Any] = SIZES | {"vocab": load_tokenizer(str(tokenizer)).vocab}
        run = tmp_path / name / "run"
        save_run(run, Model(**sizes, qkv_bias=True))
        config = load_run([str(run / "config.toml"), f"--data.tokenizer={tokenizer}"], one_device=True)
        caplog.clear()
        folder = export_model(config, tmp_path / name / "out").folder
        assert ("AutoTokenizer of transformers 5 gives other ids" in caplog.text) == is_told
        text = "the quick  fox's dog: 123, Ünïcode"
        expected = load_tokenizer(str(tokenizer)).encode_documents([text])[0].tolist()
        theirs = transformers.AutoTokenizer.from_pretrained(folder)
        assert (theirs(text).input_ids[1:] == expected) != is_told
        assert transformers.PreTrainedTokenizerFast.from_pretrained(folder)(text).input_ids[1:] == expected


@pytest.mark.parametrize("has_config", [False, True], ids=["no tokenizer_config.json", "another end"])
def test_special_tokens_of_the_template_are_those_of_the_run(has_config: bool, tmp_path: Path) -> None:
    """The run knew none, or others than the tokenizer has now; the text of a conversation stays as it was trained."""
    family = Family(
        "\n{{ bos_token }}{% for m in messages %}{{ m.content }}{{ eos_token }}{% endfor %}", QWEN25.special
    )
    tokenizer = write_tokenizer(tmp_path, family)
    config_file = tmp_path / "tokenizer_config.json"
    original = config_file.read_text()
    if not has_config:
        config_file.unlink()
    plan = plan_chat(str(tokenizer), Finetune(), 64)
    assert bool(plan.special_tokens) == has_config
    config = save_chat_run(tmp_path / "run", tokenizer, plan)
    if has_config:
        config_file.write_text(json.dumps(json.loads(original) | {"eos_token": "<|im_start|>"}))
    folder = export_model(config, tmp_path / "out").folder
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    (example,) = format_of(tokenizer, plan).examples(Conversation(TALK)).examples
    assert theirs.apply_chat_template(TALK, tokenize=True, return_dict=False) == example.ids.tolist()


def test_a_checkpoint_without_a_template_is_exported_with_that_of_its_files(tmp_path: Path) -> None:
    """So are those of earlier versions; and who names another template gets it."""
    tokenizer = write_tokenizer(tmp_path, QWEN25)
    save_chat_run(tmp_path / "run", tokenizer, None)
    run = [str(tmp_path / "run/config.toml"), f"--data.tokenizer={tokenizer}"]
    folder = export_model(load_run([*run, "--generate.chat=true"], one_device=True), tmp_path / "chat").folder
    assert (folder / "chat_template.jinja").read_text() == QWEN25.template
    im_end = format_of(tokenizer, plan_chat(str(tokenizer), Finetune(), 64)).ends_of_turn["<|im_end|>"]
    assert ends_of(folder)[0] == im_end

    named = tmp_path / "mine.jinja"
    named.write_text(FAMILIES["bare"].template)
    save_chat_run(tmp_path / "other", tokenizer, plan_chat(str(tokenizer), Finetune(), 64))
    other = [str(tmp_path / "other/config.toml"), f"--data.tokenizer={tokenizer}"]
    config = load_run([*other, f"--finetune.chat_template={named}"], one_device=True)
    folder = export_model(config, tmp_path / "named").folder
    assert (folder / "chat_template.jinja").read_text() == FAMILIES["bare"].template

    plain = export_model(load_run(run, one_device=True), tmp_path / "plain").folder
    assert ends_of(plain) == [load_tokenizer(str(tokenizer)).end]
    assert "chat_template" not in json.loads((plain / "tokenizer_config.json").read_text())


@pytest.mark.parametrize("where", ["generation_config.json", "config.json"])
def test_the_ends_of_a_published_model_are_carried_over(
    where: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """If one of them is that of the tokenizer; else, and where the model is gone, a line says that they are lost."""
    tokenizer = write_tokenizer(tmp_path, QWEN25)
    end = load_tokenizer(str(tokenizer)).end
    published = tmp_path / "published"
    save_published("llama", published, vocab_size=load_tokenizer(str(tokenizer)).vocab)
    config_file, generation_file = published / "config.json", published / "generation_config.json"
    generation_file.unlink(missing_ok=True)

    def say(ends: Any) -> None:
        old = json.loads(config_file.read_text())
        config_file.write_text(json.dumps(old | {"eos_token_id": ends if where == "config.json" else 2}))
        if where == "generation_config.json":
            generation_file.write_text(json.dumps({"eos_token_id": ends}))

    record = {"initial": PUBLISHED | {"from": str(published), "vocab": load_tokenizer(str(tokenizer)).vocab}}
    config = save_chat_run(tmp_path / "run", tokenizer, plan_chat(str(tokenizer), Finetune(), 64), record)
    say([end, 7, 9, 10**6])
    assert ends_of(export_model(config, tmp_path / "all").folder) == [end, 7, 9]
    assert not caplog.records
    say([7, 9])
    assert ends_of(export_model(config, tmp_path / "others").folder) == [end]
    assert "[7, 9], are not carried over" in caplog.text
    published.rename(tmp_path / "gone")
    assert ends_of(export_model(config, tmp_path / "lost").folder) == [end]
    assert "the ids that end its texts are not carried over (" in caplog.text
