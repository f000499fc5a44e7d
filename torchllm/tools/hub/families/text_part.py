"""Models of text and pictures or sound whose text model is of a family here. Their other parts are left out. No torch.

Such a config.json has the fields of the text model in `text_config`, and its files have its tensors under a prefix. Add
a class: a row of `TEXT_PARTS`, and a tiny config of it in tests/tools/hub/published.py.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

from torchllm.tools.hub.families.family import FieldError

TEXT_CONFIG = "text_config"
TYING = "tie_word_embeddings"
PREFIXES = (
    ("model.language_model.", "model."),
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("lm_head.", "lm_head."),
)
"""of the text model's tensors in a file, by transformers 5 and before it -> in a file of the text model alone"""


class TextPart(NamedTuple):
    """The text model within a class of models."""

    architecture: str
    """class of transformers of the whole model"""
    is_tied: bool | None = None
    """whether embedding and head are tied where config.json does not say so; None: as text_config says"""

    def fields(self, content: Mapping[str, Any]) -> dict[str, Any]:
        """Return the config.json of the text model alone. Raises FieldError if the whole model's is wrong."""
        architectures = content.get("architectures")
        if architectures and architectures != [self.architecture]:
            raise FieldError(f"architectures: must be {[self.architecture]}, not {architectures}")
        text = content.get(TEXT_CONFIG)
        if not isinstance(text, Mapping) or "model_type" not in text:
            raise FieldError(f"{TEXT_CONFIG}: must be a table with the model_type of the text model")
        of_whole = content.get(TYING, self.is_tied)
        if of_whole is None:
            of_whole = text.get(TYING, False)
        elif self.is_tied is None and text.get(TYING, of_whole) != of_whole:
            raise FieldError(f"{TYING}: is {of_whole}, but {TEXT_CONFIG}.{TYING} is {text[TYING]}: remove one of them")
        quantization = content.get("quantization_config", text.get("quantization_config"))
        return {**text, "architectures": None, TYING: of_whole, "quantization_config": quantization}

    @staticmethod
    def key_of(key: str) -> str | None:
        """Return the key that a file of the text model has for a tensor; None if it is of another part."""
        for prefix, of_text in PREFIXES:
            if key.startswith(prefix):
                return of_text + key.removeprefix(prefix)
        return None


TEXT_PARTS = {
    "gemma4": TextPart("Gemma4ForConditionalGeneration", is_tied=True),
    "llava": TextPart("LlavaForConditionalGeneration"),
    "mistral3": TextPart("Mistral3ForConditionalGeneration", is_tied=True),
    "qwen3_5": TextPart("Qwen3_5ForConditionalGeneration", is_tied=False),
    "qwen3_5_moe": TextPart("Qwen3_5MoeForConditionalGeneration", is_tied=False),
}
"""by model_type of the whole model"""
