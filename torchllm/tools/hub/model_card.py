"""The model card of an exported model: README.md, which says how it is loaded. No torch."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from torchllm import __version__


class CardFacts(NamedTuple):
    steps: Sequence[int]
    """of the checkpoints whose mean it is, the newest first"""
    name: str
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
    trained = f"{facts.kind} trained with [torchllm](https://pypi.org/project/torchllm) {__version__}"
    start = f", from `{facts.base_model}`" if facts.base_model else ""
    lines += [f"{trained}{start}; step {facts.steps_in_words}.", ""]
    lines += [*(_use_of_adapter(facts) if facts.is_adapter else _use_of_model(facts)), ""]
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
