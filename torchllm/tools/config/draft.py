"""A config while it is being read: what `load.py` reads, `resolve.py` fills in and `refuse.py` checks."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Generic, TypeVar

from torchllm.config.read import read_table
from torchllm.config.schema import AXES, Config
from torchllm.config.toml import KeyPath, dotted
from torchllm.tools.config.arguments import Arguments, override
from torchllm.tools.config.environment import Ranks
from torchllm.tools.config.inert import contradictions
from torchllm.tools.config.toml_files import Layer, merge_layers

C = TypeVar("C", bound=Config)

TRAINING_ONLY = ("optimizer", "schedule")
"""sections that a recipe ignores if it only uses the weights of a run: a fork may have added keys to them"""
RESOLVED_SECTIONS = (
    *("run", "cluster", "model", "data", "training", "optimizer", "schedule", "parallel", "recompute", "compile"),
    *("checkpoint", "metrics", "evaluate", "generate"),
)
"""keys in the config.toml of every run folder, whatever version wrote it"""


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


@dataclass
class Draft(Generic[C]):
    """A config while it is being read: its values, their origins, and the errors so far."""

    arguments: Arguments
    layer: Layer
    config: C
    """wrong keys have their default"""
    ranks: Ranks | None
    """processes of the run; None: the environment is invalid"""
    one_device: bool
    """the recipe runs in one process, whatever [parallel] says"""
    uses_weights: bool = False
    """the recipe only uses the weights of a run"""
    wrong: set[str] = field(default_factory=set)
    """keys ("training.steps") whose value is wrong"""
    errors: list[str] = field(default_factory=list)
    """lines for stderr, each with its file and line"""
    notes: list[str] = field(default_factory=list)
    """lines for stderr that are no errors"""

    @property
    def file(self) -> str:
        """The config file, for messages."""
        return self.arguments.file or "defaults"

    @property
    def sources(self) -> Sources:
        """The files and the command line that the config was read from."""
        return Sources(self.layer, self.arguments.overrides, self.config)

    @property
    def is_started(self) -> bool:
        """Whether this process is a rank of the run, or the only one."""
        return self.one_device or (self.ranks is not None and self.ranks.are_started)

    def origin(self, path: KeyPath) -> str:
        """Return the origin of a key ("x.toml:3", "--training.steps"), or of its table in an array; else the file.

        The line of a [section] is no help for a key that the section lacks; the line of one table of an array is.
        """
        for length in range(len(path), 0, -1):
            origin = self.layer.origins.get(path[:length])
            if origin and (length == len(path) or length > 1):
                return origin
        return self.file

    def is_overridden(self, path: KeyPath) -> bool:
        """Whether a key's value is from the command line."""
        return self.origin(path) == f"--{dotted(path)}"

    def located(self, path: KeyPath, message: str) -> str:
        """Return a line that says where a key was written, which one it is, and the message."""
        return f"{self.place(path)}: {message}"

    def place(self, path: KeyPath) -> str:
        """Return a key after its origin: "x.toml:3: training.steps"."""
        return f"--{dotted(path)}" if self.is_overridden(path) else f"{self.origin(path)}: {dotted(path)}"

    @property
    def is_resolved(self) -> bool:
        """Whether the file is the config of a run folder: it has every section, the folder and every degree.

        The user did not choose each key in such a file, and keys without effect were reported at the first start.
        """
        paths: list[KeyPath] = [(section,) for section in RESOLVED_SECTIONS]
        paths += [("run", "folder"), *(("parallel", axis) for axis in AXES)]
        written = self.layer.files[-1].origins if self.layer.files else {}
        return all(path in written for path in paths)

    def is_asked_about(self, path: KeyPath) -> bool:
        """Whether the user chose a key for this command: no key of a resolved file, and none of an unused section."""
        if self.is_overridden(path):
            return True
        return not self.is_resolved and not (self.uses_weights and path[0] in TRAINING_ONLY)

    def report(self, path: KeyPath, message: str) -> None:
        """Add an error."""
        self.errors.append(self.located(path, message))
