"""Build hook: a wheel holds train_configs/, recipes/ and run_train.sh inside the package (tools/resources.py)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

CHECKOUT_ONLY = (
    "checkpoint_index",
    "context",
    "counting",
    "data",
    "experts",
    "host_groups",
    "scale",
    "scale_counts",
    "schedules",
    "stopped_rank",
    "tokenizing",
    "watch",
)
"""files of recipes/benchmark that are in no wheel: they measure torchllm, not a user's machine"""


class PackageResources(BuildHookInterface):
    """Add the files to a wheel. An editable install reads those of the checkout and must not hold copies."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        for name in ("train_configs", "run_train.sh"):
            build_data["force_include"][str(root / name)] = f"torchllm/{name}"
        left_out = {root / "recipes" / "benchmark" / f"{name}.py" for name in CHECKOUT_ONLY}
        for file in (root / "recipes").rglob("*"):
            if file.is_file() and "__pycache__" not in file.parts and file not in left_out:
                build_data["force_include"][str(file)] = f"torchllm/{file.relative_to(root).as_posix()}"
