"""The stand-in does what its page says: what is real on it, what is counted, and what reads as zero."""

import sys
import textwrap

import pytest

from tests.hollow.bed import ARCHITECTURES, H100, Machine, run


def on_bed(program: str, machine: Machine = H100, **variables: str) -> str:
    """Run a Python program on the hollow GPU; return what it printed."""
    source = "import torch\nfrom tests.hollow import counts\n" + textwrap.dedent(program)
    done = run([sys.executable, "-c", source], machine, **variables)
    assert done.returncode == 0, done.stdout
    return done.stdout.strip()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_torch_sees_a_gpu_of_each_architecture(architecture: str) -> None:
    printed = on_bed(
        """
        major, minor = torch.cuda.get_device_capability()
        print(f"sm_{major}{minor}", torch.cuda.device_count(), torch.cuda.is_bf16_supported())
        """,
        Machine(architecture, devices=3),
    )
    assert printed == f"{architecture} 3 True"


def test_an_unknown_architecture_is_refused() -> None:
    done = run([sys.executable, "-c", "import torch; torch.cuda.init()"], Machine("sm_75"))
    assert done.returncode == 2
    assert "HOLLOW_ARCHITECTURE=sm_75: none of sm_80, sm_89" in done.stdout


def test_work_is_counted_by_kind_and_name() -> None:
    printed = on_bed(
        """
        x = torch.zeros(64, 64, device="cuda")
        counts.reset()
        y = (x @ x).relu()
        z = y.clone()
        y.cpu()
        counted = counts.read()
        print([counts.times(counted, kind) for kind in ("launch", "copy", "sync")])
        print(counts.names(counted, "copy"), list(counts.names(counted, "launch")))
        """
    )
    numbers, names = printed.splitlines()
    assert numbers == "[2, 2, 1]"
    assert "'on the device': 1" in names
    assert "cublasSgemm_v2" in names
    assert "launch_clamp_scalar" in names or "relu" in names


def test_what_is_read_back_is_zero() -> None:
    assert on_bed('print((torch.ones(1000, device="cuda") + 1).sum().item())') == "0.0"


def test_what_the_host_has_just_written_is_read_back() -> None:
    assert on_bed('print(torch.tensor([3, 4], device="cuda").tolist())') == "[3, 4]"


def test_a_kernel_makes_what_the_host_has_written_unknown() -> None:
    """It may have overwritten that memory, which torch's allocator hands on."""
    printed = on_bed(
        """
        x = torch.tensor([3, 4], device="cuda")
        torch.ones(9, device="cuda")
        print(x.tolist())
        """
    )
    assert printed == "[0, 0]"


def test_the_host_faults_at_device_memory() -> None:
    program = "import torch, ctypes; ctypes.string_at(torch.ones(9, device='cuda').data_ptr())"
    done = run([sys.executable, "-c", program])
    assert done.returncode == -11


def test_the_capacity_is_enforced_and_costs_no_memory_of_the_host() -> None:
    printed = on_bed(
        """
        held = torch.empty(7 * 2**30, dtype=torch.uint8, device="cuda")
        try:
            torch.empty(2**30, dtype=torch.uint8, device="cuda")
        except torch.cuda.OutOfMemoryError as error:
            print(error)
        """,
        Machine(gib=8),
    )
    assert "Tried to allocate 1024.00 MiB. GPU 0 has a total capacity of 8.00 GiB" in printed


def test_expandable_segments() -> None:
    program = """
        held = [torch.empty(n * 2**20, dtype=torch.uint8, device="cuda") for n in range(1, 40)]
        del held[::2]
        print(torch.cuda.memory_reserved() / 2**20, torch.empty(60 * 2**20, device="cuda").is_cuda)
    """
    reserved, works = on_bed(program, PYTORCH_ALLOC_CONF="expandable_segments:True").split()
    assert works == "True"
    assert float(reserved) < 2 * 780


def test_a_gpu_that_is_stuck(tmp_path: object) -> None:
    program = f"""
        import threading
        event = torch.cuda.Event()
        event.record()
        print(event.query())
        open("{tmp_path}/stuck.0", "w").close()
        print(event.query())
        waiting = threading.Thread(target=torch.cuda.synchronize, daemon=True)
        waiting.start()
        waiting.join(0.5)
        print(waiting.is_alive())
    """
    assert on_bed(program, HOLLOW_STUCK=f"{tmp_path}/stuck").split() == ["True", "False", "True"]
