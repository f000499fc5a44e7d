from pathlib import Path

import pytest
import torch

from tests.runtime.test_process import error_of
from torchllm.config import Training
from torchllm.config.errors import UserError
from torchllm.runtime import device as devices
from torchllm.runtime.device import choose_device, compute_dtype, has_usable_gpu


def test_a_gpu_that_this_process_may_use(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "none").mkdir()
    assert not has_usable_gpu(tmp_path / "none")
    (tmp_path / "nvidiactl").touch()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert not has_usable_gpu(tmp_path)
    (tmp_path / "nvidia0").touch()
    assert has_usable_gpu(tmp_path)
    for visible, expected in (("0", True), ("", False), ("-1", False)):
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
        assert has_usable_gpu(tmp_path) == expected, visible


def test_a_gpu_that_torch_cannot_use_is_no_silent_training_on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(devices, "has_usable_gpu", lambda: True)
    with pytest.raises(UserError, match=r'cannot use it: .* set run.device = "cpu" to train on the CPU'):
        choose_device("auto", 0)
    assert choose_device("cpu", 0).type == "cpu"
    monkeypatch.setattr(devices, "has_usable_gpu", lambda: False)
    assert choose_device("auto", 0).type == "cpu"


def test_devices(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert choose_device("auto", 3) == choose_device("cpu", 3) == torch.device("cpu")
    assert error_of(lambda: choose_device("cuda", 0)) == (
        'run.device = "cuda", but torch sees no GPU here; use "auto" or "cpu"'
    )
    chosen: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    assert choose_device("auto", 1) == torch.device("cuda", 1)
    assert chosen == [torch.device("cuda", 1)]
    assert choose_device("cpu", 1) == torch.device("cpu")
    error = error_of(lambda: choose_device("auto", 2))
    assert error.startswith("local rank 2 has no GPU: it sees only 2. Lower NPROC")


def test_compute_dtype() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda", 0)
    assert [compute_dtype(Training(), device) for device in (cpu, cuda)] == [torch.float32, torch.bfloat16]
    assert compute_dtype(Training(dtype="bfloat16"), cpu) == torch.bfloat16
    assert compute_dtype(Training(dtype="float32"), cuda) == torch.float32
