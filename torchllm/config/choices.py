"""Decide which source of a config made a key idle: the source that wrote the key, or another one.

The sources are the files, each over its base, and the command line over them. A file that sets optimizer.beta2 is right
with AdamW, and so is a command line that chooses optimizer.name = "sgd" for a first try: the key is reported, and the
run goes on. Only a source that contradicts itself is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import fields, replace

from torchllm.config.arguments import override
from torchllm.config.inert import contradictions
from torchllm.config.read import read_table
from torchllm.config.schema import Config
from torchllm.config.toml import KeyPath, Layer, merge_layers


class Sources:
    """The files and the command line that a config was read from."""

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
