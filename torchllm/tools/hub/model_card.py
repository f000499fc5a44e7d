"""The model card of an exported model: README.md with the facts of its run. No torch."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from torchllm import __version__
from torchllm.config import Model, TrainedParameters
from torchllm.facts.flops import parameter_count, trained_parameter_count

Rows = list[tuple[str, str]]


class CardFacts(NamedTuple):
    model: Model
    trained: TrainedParameters
    updates: Rows
    """of the table, about low-rank updates"""
    dtype: str
    """of the written weights"""
    steps: Sequence[int]
    """of the checkpoints whose mean it is, the newest first"""
    tokens: int | None
    """seen until the newest step"""
    versions: Mapping[str, str]
    """versions of the software that trained the run"""
    name: str = ""
    """of the folder"""
    base_model: str = ""
    """published model whose weights the run started from; "" if they were random"""
    missing_tokenizer: str = ""
    """why there are no tokenizer files; "" if there are"""
    kind: str = "A language model"
    is_adapter: bool = False
    """there are the low-rank updates alone"""

    @property
    def steps_in_words(self) -> str:
        """The step, or the steps of a mean."""
        if len(self.steps) == 1:
            return str(self.steps[0])
        return f"mean of {', '.join(str(step) for step in sorted(self.steps))}"


def write_model_card(folder: Path, facts: CardFacts) -> None:
    (folder / "README.md").write_text(model_card(facts), encoding="utf-8")


def model_card(facts: CardFacts) -> str:
    """Return the text of README.md, with the head that the hub reads."""
    library = "peft" if facts.is_adapter else "transformers"
    head = [f"library_name: {library}", "pipeline_tag: text-generation", "tags:", "- torchllm"]
    if facts.base_model and not Path(facts.base_model).is_absolute():
        head.append(f"base_model: {facts.base_model.partition('@')[0]}")
    lines = ["---", *head, "---", "", f"# {facts.name}", ""]
    lines += [f"{facts.kind} trained with [torchllm](https://pypi.org/project/torchllm) {__version__}.", ""]
    lines += ["| | |", "|---|---|"]
    lines += [f"| {key} | {value} |" for key, value in _rows(facts)]
    lines += ["", *(_use_of_adapter(facts) if facts.is_adapter else _use_of_model(facts)), ""]
    return "\n".join(lines)


def _use_of_model(facts: CardFacts) -> list[str]:
    """Return the lines that say how the model is loaded."""
    lines = ["```python", "from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{facts.name}")']
    if facts.missing_tokenizer:
        return [*lines, "```", "", f"There are no tokenizer files: {facts.missing_tokenizer}."]
    return [*lines, f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")', "```"]


def _use_of_adapter(facts: CardFacts) -> list[str]:
    """Return the lines that say how the adapter is loaded, upon which model."""
    base = facts.base_model.partition("@")[0] or "MODEL"
    lines = ["```python", "from peft import PeftModel"]
    lines += ["from transformers import AutoModelForCausalLM, AutoTokenizer, GenerationConfig", ""]
    lines += [f'model = AutoModelForCausalLM.from_pretrained("{base}")']
    lines += [f'model = PeftModel.from_pretrained(model, "{facts.name}")']
    if not facts.missing_tokenizer:
        lines += [f'model.generation_config = GenerationConfig.from_pretrained("{facts.name}")']
        lines += [f'tokenizer = AutoTokenizer.from_pretrained("{facts.name}")']
    lines += ["```"]
    if not facts.base_model:
        lines += ["", "MODEL is an export of the run from whose weights this one has started; it is not published."]
    return lines


def _rows(facts: CardFacts) -> Rows:
    """Return the facts that are known, each with its name."""
    model = facts.model
    parameters = f"{parameter_count(model):,}"
    updates = f"{trained_parameter_count(model, facts.trained):,}"
    rows = [
        ("parameters", f"{updates}, in addition to {parameters} of the model" if facts.is_adapter else parameters),
        ("sizes", f"{model.layers} blocks, hidden {model.hidden}, {model.heads} heads, {model.kv} key-value heads"),
        ("vocabulary", f"{model.vocab:,}"),
        ("weights", facts.dtype),
        ("step", facts.steps_in_words),
    ]
    if facts.base_model:
        rows.append(("started from", f"`{facts.base_model}`"))
    rows += facts.updates
    if facts.tokens is not None:
        rows.append(("training tokens", f"{facts.tokens:,}"))
    if facts.versions:
        rows.append(("trained with", ", ".join(f"{name} {version}" for name, version in facts.versions.items())))
    return rows
