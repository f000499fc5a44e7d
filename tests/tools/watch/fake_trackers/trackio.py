"""The calls of trackio that torchllm makes."""

from typing import Any

import calls


class Run:
    def log(self, values: dict[str, float], step: int) -> None:
        calls.log(step, values)

    def finish(self) -> None:
        calls.call("close")


def init(project: str, *, name: str, config: dict[str, Any], **rest: Any) -> Run:
    assert rest["resume"] == "allow"
    calls.call("open", project, name.rpartition("-")[2], config)
    return Run()
