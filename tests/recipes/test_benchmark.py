import json
import math
import subprocess
import sys
from base64 import b64encode
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from tests.patience import patience
from tests.tiny_run import ROOT, SMALL

RECIPE = str(ROOT / "recipes" / "benchmark")
SHORT = [*SMALL, "--benchmark.rounds=2", "--benchmark.steps=2", "--benchmark.warmup=1", "--benchmark.seconds=0.001"]


def benchmark(*arguments: str, ranks: int = 0, seconds: float = 300) -> subprocess.CompletedProcess[str]:
    """Run the recipe; `ranks` over 0: under torchrun. seconds: after which it is ended, and the test fails."""
    command = [sys.executable]
    if ranks:
        command += ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    command += [RECIPE, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=patience(seconds))


def measured(name: str, folder: Path, *overrides: str, ranks: int = 0) -> dict[str, Any]:
    """What a short benchmark prints as JSON, its only line on stdout."""
    done = benchmark(name, *SHORT, f"--run.folder={folder}", "--benchmark.json=true", *overrides, ranks=ranks)
    assert done.returncode == 0, done.stderr
    assert not (folder / "scratch").exists()
    result: dict[str, Any] = json.loads(done.stdout)
    assert result.pop("benchmark") == name
    assert result.pop("environment")["ranks"] == (ranks or 1)
    return result


def check_ratio(row: dict[str, Any], name: str) -> None:
    assert row["what"] == name
    assert 0 < row["least"] <= row["ratio"] <= row["largest"] < 100


def test_a_wrong_name_lists_the_right_ones() -> None:
    done = benchmark("stpe")
    assert (done.returncode, done.stdout) == (2, "")
    assert "matmul, step, tokenizing, data, checkpoint, schedules, watch, context, scale" in done.stderr
    assert done.stderr.count("\n") == 1


def test_a_wrong_key_is_found_before_torch_is_imported() -> None:
    program = f"import sys, runpy; sys.modules['torch'] = None; sys.argv[1:] = ['step', '--benchmark.round=1']; \
runpy.run_path({RECIPE!r}, run_name='__main__')"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=patience(120))
    assert done.returncode == 2
    assert "did you mean benchmark.rounds?" in done.stderr


@pytest.mark.exhaustive
def test_matmul_prints_a_table_of_every_shape(tmp_path: Path) -> None:
    done = benchmark("matmul", *SHORT, f"--run.folder={tmp_path}", "--training.loss_chunk=48")
    assert done.returncode == 0, done.stderr
    facts, _, title, _, head, rule, *rows = done.stdout.splitlines()
    assert facts.startswith("matmul: torch ")
    assert title == "matrix products"
    assert head == "| dtype | matrix | m | n | k | tflops | share_of_peak |"
    assert rule == "| --- | --- | --- | --- | --- | --- | --- |"
    cells = [[cell.strip() for cell in row.strip("|").split("|")] for row in rows]
    assert ["up_proj", "64", "64", "32"] in [row[1:5] for row in cells]  # 2 sequences of 32 tokens
    assert ["k_proj, v_proj", "64", "16", "32"] in [row[1:5] for row in cells]
    assert ["lm_head", "48", "264", "32"] in [row[1:5] for row in cells]
    assert cells[0][1] == "square"
    # no upper limit: beside other work the peak is measured lower than what a product reaches in a quiet moment
    assert all(float(rate) > 0 and float(share) > 0 for *_, rate, share in cells)


@pytest.mark.parametrize(
    ("ranks", "baseline"), [(0, "bare loop"), pytest.param(2, "bare FSDP2", marks=pytest.mark.exhaustive)]
)
def test_step_compares_with_a_bare_loop(tmp_path: Path, ranks: int, baseline: str) -> None:
    result = measured("step", tmp_path, ranks=ranks)
    assert [row["loop"] for row in result["training step"]] == ["torchllm", baseline]
    for row in result["training step"]:
        assert row["tokens_per_second"] == pytest.approx(16 * 32 / row["step_ms"] * 1e3)
        assert 0 < row["mfu"] == row["hfu"] < 1
        assert row["peak_memory_gib"] is None  # of a GPU
    check_ratio(result["step time"][0], f"torchllm / {baseline}")


@pytest.mark.exhaustive
def test_step_of_bfloat16_lists_operators_on_request(tmp_path: Path) -> None:
    options = (
        "--training.dtype=bfloat16",
        "--model.layers=1",
        "--training.global_batch_size=4",
        "--recompute.mode=full",
    )
    done = benchmark("step", *SHORT, f"--run.folder={tmp_path}", "--benchmark.profile=3", *options)
    assert done.returncode == 0, done.stderr
    assert "aten::" in done.stderr
    assert "| torchllm / bare loop |" in done.stdout


@pytest.mark.exhaustive
def test_tokenizing_compares_with_encode_batch_on_one_process_and_on_two(tmp_path: Path) -> None:
    (tmp_path / "schema.py").write_bytes((ROOT / "torchllm" / "config" / "schema.py").read_bytes())
    source = ("--data.sources.0.kind=text", f"--data.sources.0.path={tmp_path}/schema.py")
    ranks = tmp_path / "bytes.tiktoken"  # cl100k takes each process seconds to load
    tokens = [b64encode(bytes([value])).decode() for value in range(256)]
    ranks.write_text("".join(f"{token} {rank}\n" for rank, token in enumerate(tokens)))
    tokenizer = (f"--benchmark.tokenizer={ranks}", "--benchmark.pattern=cl100k")
    result = measured("tokenizing", tmp_path / "run", *source, *tokenizer, "--benchmark.text_mb=0.1")
    document = (tmp_path / "schema.py").stat().st_size
    documents = math.ceil(0.1e6 / document)
    for form in ("bytes.tiktoken", "tokenizer.json"):
        rows = result[form]
        names = [row["what"] for row in rows]
        assert names == ["prepare, 1 process", "prepare, 2 processes", "encode_batch, 1 thread"]
        for row in rows:
            assert row["documents"] == documents
            assert row["text_mb"] == pytest.approx(documents * document / 1e6)
            assert row["mb_per_second"] > 0
            assert row["mb_per_cpu_second"] > 0
        per_core, by_clock, processes = result[f"{form}, ratios"]
        check_ratio(per_core, "prepare / encode_batch, per core")
        check_ratio(by_clock, "prepare / encode_batch, by the clock")
        check_ratio(processes, "2 processes / 1, by the clock")
        assert processes["ratio"] < 1  # two processes take longer to start than so little text takes


@pytest.mark.exhaustive
def test_data_times_the_wait(tmp_path: Path) -> None:
    for name in ("schema.py", "load.py"):
        (tmp_path / name).write_bytes((ROOT / "torchllm" / "config" / name).read_bytes())
    source = ("--data.sources.0.kind=text", f"--data.sources.0.path={tmp_path}/*.py", f"--data.cache={tmp_path}/cache")
    result = measured("data", tmp_path / "run", *source)
    (wait,) = result["batches of one rank"]
    assert 0 < wait["wait_share"] < 1
    assert 0 < wait["wait_ms"] < wait["step_ms"]
    assert wait["loader_alone_tokens_per_second"] > 0


@pytest.mark.exhaustive
def test_checkpoint_compares_the_two_kinds_of_saves(tmp_path: Path) -> None:
    result = measured("checkpoint", tmp_path)
    (saves,) = result["saves"]
    assert all(saves[key] > 0 for key in ("synchronous_ms", "call_ms", "step_ms", "step_beside_ms"))
    assert saves["steps_beside"] >= 1
    both, call = result["time taken from training"]
    assert both["what"] == "asynchronous / synchronous"  # of either sign where a step's time varies more
    check_ratio(call, "its call / synchronous")


@pytest.mark.exhaustive
def test_schedules_take_what_the_simulator_says(tmp_path: Path) -> None:
    """With stages of 5 ms, of which torch takes one or two; figures with 100 ms and more are in BENCHMARKS.md."""
    once = ["--benchmark.rounds=1", "--benchmark.sleep=0.01", "--benchmark.json=true", f"--run.folder={tmp_path}"]
    done = benchmark("schedules", *SMALL, *once, ranks=2)
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert result.pop("benchmark") == "schedules"
    assert result.pop("environment")["ranks"] == 2
    names = ["1F1B", "GPipe", "Interleaved1F1B", "LoopedBFS", "InterleavedZeroBubble", "ZBVZeroBubble"]
    for rows in result.values():
        few_micro_batches, many_micro_batches = rows[:6], rows[6:]
        assert [row["schedule"] for row in few_micro_batches] == names
        assert [row["schedule"] for row in many_micro_batches] == [*names, "DualPipeV"]
        assert {row["micro_batches"] for row in few_micro_batches} == {2}
        assert {row["micro_batches"] for row in many_micro_batches} == {8}
        for row in rows:
            assert row["ratio"] >= 1, row  # nobody waits less than the simulator says
            assert row["bubble"] > row["simulated_bubble"] * (1 - 1e-9)
            if row["bubble_in_theory"] is not None:
                assert row["simulated_bubble"] == pytest.approx(row["bubble_in_theory"])
        assert median(row["ratio"] for row in rows) < 4  # 1.1 where nothing else runs
    equal = result["equal stages"]
    without_theory = [index for index, row in enumerate(equal) if row["bubble_in_theory"] is None]
    assert without_theory == [names.index("ZBVZeroBubble")]  # two micro batches are too few for its closed form
    assert {row["bubble_in_theory"] for row in result["unequal stages"]} == {None}
    interleaved = equal[6 + names.index("Interleaved1F1B")]
    assert interleaved["simulated_gain"] == pytest.approx((1 + 1 / 8) / (1 + 1 / 16))  # bubbles 1 / m and 1 / (2 m)


@pytest.mark.exhaustive
def test_schedules_need_ranks(tmp_path: Path) -> None:
    done = benchmark("schedules", *SHORT, f"--run.folder={tmp_path}")
    assert done.returncode == 1
    assert "under torchrun with 4 or 8 ranks" in done.stderr


@pytest.mark.exhaustive
def test_context_measures_what_the_formulas_say(tmp_path: Path) -> None:
    """Ring attention keeps 1 / cp of the activations; ulysses one more (B, S / cp, H, Q) a block, behind the core."""
    result = measured("context", tmp_path, ranks=2)
    rows = result["one micro batch of one rank"]
    assert [(row["method"], row["ranks"]) for row in rows] == [("ring", 1), ("ring", 2), ("ulysses", 1), ("ulysses", 2)]
    alone, ring, same, ulysses = rows
    assert alone["activations_mib"] == same["activations_mib"] > 0
    assert ring["share"] == pytest.approx(0.5, rel=0.01)
    assert 0.5 < ulysses["share"] < 0.6
    for row in rows:
        assert row["forward_mib"] == row["formula_mib"]
        assert row["backward_mib"] == row["backward_formula_mib"]
    assert ring["forward_mib"] > alone["forward_mib"] == 0
    assert ring["backward_mib"] == 2 * ring["forward_mib"]
    assert ulysses["backward_mib"] == ulysses["forward_mib"] > 0


@pytest.mark.exhaustive
def test_watch_compares_profiled_steps_with_others(tmp_path: Path) -> None:
    ((row,),) = measured("watch", tmp_path).values()
    assert row["step_s"] > 0
    assert row["steps_between_profiles"] >= 10  # metrics.breakdown_interval
    run = row["steps_between_profiles"] * row["step_s"]
    assert row["share_of_the_run"] == pytest.approx(row["extra_s"] / run)
    assert row["standard_error"] > 0


@pytest.mark.exhaustive
@pytest.mark.parametrize("option", ["--benchmark.rounds=1", "--metrics.breakdown_interval=0"])
def test_watch_needs_rounds_and_an_interval(option: str, tmp_path: Path) -> None:
    done = benchmark("watch", *SMALL, f"--run.folder={tmp_path}", option)
    assert done.returncode == 1
    assert "needs 2 rounds or more, and metrics.breakdown_interval over 0" in done.stderr
