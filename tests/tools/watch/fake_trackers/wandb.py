"""The calls of Weights & Biases that torchllm makes. Without FAKE_KEY only `mode="offline"` works."""

import os
from types import SimpleNamespace
from typing import Any

import calls


class errors:
    """wandb.errors"""

    class Error(Exception):
        pass


def Settings(**settings: Any) -> dict[str, Any]:
    return settings


def setup() -> SimpleNamespace:
    """Return a service whose server is at FAKE_SERVER; without it, at a port that nobody listens to."""
    server = os.environ.get("FAKE_SERVER", "http://127.0.0.1:9")
    return SimpleNamespace(settings=SimpleNamespace(base_url=server, mode="online"))


class Run:
    def define_metric(self, name: str, step_metric: str | None = None) -> None:
        pass

    def log(self, values: dict[str, float]) -> None:
        rest = dict(values)
        calls.log(int(rest.pop("step")), rest)

    def finish(self) -> None:
        calls.call("close")


def teardown() -> None:
    pass


def init(*, project: str, name: str, id: str, config: dict[str, Any], mode: str = "online", **rest: Any) -> Run:
    assert rest["resume"] == "allow"
    if mode == "online" and "FAKE_KEY" not in os.environ:
        raise errors.Error("no API key")
    calls.call("open", project, id, config, mode)
    return Run()
