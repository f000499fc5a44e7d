"""Keys that another key makes idle: an error if one file, or the command line, has both."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from typing import Any

from torchllm.config.keys import KeyPath
from torchllm.config.schema import Config
from torchllm.tools.config.draft import TRAINING_ONLY, Draft, override
from torchllm.tools.config.idle import IdleKey, contradictions
from torchllm.tools.config.read import read_table
from torchllm.tools.config.toml_files import Layer, merge_layers


class Sources:
    """The files, each over its base, and the command line over them: they decide if a key without effect is an error.

    A file that sets optimizer.beta2 is right with AdamW, and so is a command line that chooses optimizer.name = "sgd"
    for a first try: the key is reported, and the run goes on. Only a source that contradicts itself is refused.
    """

    def __init__(self, layer: Layer, overrides: Mapping[str, str], config: Config) -> None:
        """Take the files of `layer`, and the overrides ("section.key" to text) over them. config: the merged result."""
        self.files = layer.files
        self.overrides = overrides
        self.config = config

    def contradict_themselves(self, path: KeyPath) -> bool:
        """Whether a key that is idle in the config is also idle for its own source.

        It is not if the source alone would use it (a source below made it idle), nor if the files up to that source, or
        up to one above it, would use it (a source above made it idle).
        """
        key = ".".join(path)
        configs = self._without_other_choices(path)
        return all(key in [idle_key.key for idle_key in contradictions(config)] for config in configs)

    def _without_other_choices(self, path: KeyPath) -> Iterator[Config]:
        """Yield the source of a key as a config: alone, then over its bases, then under each source above it."""
        if ".".join(path) in self.overrides:
            yield self._read(self._command_line())
            return
        of_key = [index for index, file in enumerate(self.files) if path in file.origins]
        if not of_key:  # a default of a fork's own schema
            return
        index = of_key[-1]
        yield self._read(self.files[index])
        for end in range(index + 1, len(self.files) + 1):
            yield self._read(merge_layers(self.files[:end]))

    def _command_line(self) -> Layer:
        layer = Layer({}, {})
        for key, text in self.overrides.items():
            override(layer, type(self.config), tuple(key.split(".")), text, [])
        return layer

    def _read(self, layer: Layer) -> Config:
        """Return a layer as a config; with model.from_hf, missing keys of [model] come from the published model."""
        config: Config = read_table(type(self.config), layer.table, [])
        if self.config.model.from_hf:
            written = layer.table.get("model", {})
            published = {
                item.name: getattr(self.config.model, item.name)
                for item in fields(self.config.model)
                if item.name not in written
            }
            config = replace(config, model=replace(config.model, **published))
        return config


def report_contradictions(draft: Draft[Any], found: Sequence[IdleKey]) -> None:
    """Report keys that their own source made idle; note, on one line, keys that another source made idle.

    found: the `contradictions` of the config. Skips keys of a resolved file unless the command line made them idle.
    Skips sections with a wrong value, since its default stands in for it: `kind = "hub"` says nothing about the other
    keys of a source.
    """
    idle: list[IdleKey] = []
    sources = Sources(draft.layer, draft.arguments.overrides, draft.config)
    wrong_sections = {key.split(".")[0] for key in draft.wrong}
    for idle_key in found:
        path = tuple(idle_key.key.split("."))
        if path[0] in wrong_sections or (draft.uses_weights and path[0] in TRAINING_ONLY):
            continue
        if not sources.contradict_themselves(path):
            idle.append(idle_key)
        elif draft.is_asked_about(path):
            draft.report(path, f"{idle_key.message}{idle_key.remedy}")
    if idle:
        draft.notes.append(describe_idle_keys(idle, lambda key: draft.place(tuple(key.split(".")))))


def describe_idle_keys(found: Sequence[IdleKey], located: Callable[[str], str]) -> str:
    """Return one line about keys without effect. located: returns a key after its origin."""
    keys: dict[str, list[str]] = {}
    for idle_key in found:
        keys.setdefault(idle_key.reason, []).append(located(idle_key.key))
    parts = []
    for reason, members in keys.items():
        verb, subject = ("does", "it") if len(members) == 1 else ("do", "they")
        needs = reason if len(members) == 1 else reason.replace("needs", "need", 1)
        parts.append(f"{', '.join(members)}: {verb} nothing in this run: {subject} {needs}")
    return "; ".join(parts)
