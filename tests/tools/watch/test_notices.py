from pathlib import Path
from unittest import mock

from tests.metrics.test_monitor import monitor_of
from tests.parity import tiny
from tests.workers import run
from torchllm.tools.watch.notices import Events


def _events(folder: Path) -> list[str]:
    """What `run.on_event` was called with in four logged steps."""
    config = tiny({"model.experts": 4, "model.top_k": 1, "model.router_renormalize": False, "run.on_event": "tell me"})
    calls: list[str] = []

    def call(*arguments: object) -> None:
        calls.append(" ".join(map(str, arguments)))

    with mock.patch("torchllm.tools.launch.on_event.call_on_event", call):
        events = Events()
        monitor = monitor_of(folder, config, [events])
        for n, skipped in enumerate((0.0, 1.0, 1.0, 2.0)):
            monitor.meter.load_alarms = n // 2
            events.logged(n, {"skipped_steps": skipped})
    return calls


def test_a_skipped_step_and_unequal_loads_of_experts_are_events_once(tmp_path: Path) -> None:
    assert run(_events, 1, tmp_path) == [[f"tell me nan {tmp_path}", f"tell me imbalance {tmp_path}"]]
