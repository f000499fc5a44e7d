"""Build hook: a wheel holds train_configs/, recipes/ and run_train.sh inside the package (tools/resources.py)."""

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class PackageResources(BuildHookInterface):
    """Add the files to a wheel. An editable install reads those of the checkout and must not hold copies."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        if version == "editable":
            return
        root = Path(self.root)
        for name in ("train_configs", "recipes", "run_train.sh"):
            build_data["force_include"][str(root / name)] = f"torchllm/{name}"
