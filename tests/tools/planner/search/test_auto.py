"""A run that leaves its layout to the planner."""

from dataclasses import replace
from pathlib import Path

import pytest

from tests.tiny_run import DEBUG, ROOT
from torchllm.config import Cluster, Compile, Config, Data, Float8, MixtureStage, Model, Parallel, Recompute, Training
from torchllm.config.errors import UserError
from torchllm.tools.config.checks import problems
from torchllm.tools.front.start import load_configs
from torchllm.tools.planner.search.auto import (
    choose_layouts,
    cluster_with_gpu,
    device,
    planned,
    why_unplanned,
)

CONFIG = Config(
    cluster=Cluster("dgx_a100"),
    model=Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    training=Training(global_batch_size=64, sequence_length=2048, micro_batch_size=4),
    parallel=Parallel(layout="auto", tp=2, keep_last_block=False),
    recompute=Recompute("full"),
)


def test_what_the_run_gives_stays_and_the_rest_is_chosen() -> None:
    [free], line = choose_layouts(CONFIG, 16, ())
    assert choose_layouts(CONFIG, 16, ()) == ([free], line)  # on another rank
    assert free.parallel.layout == "manual"
    assert free.parallel.keep_last_block is False
    assert not list(problems(free, 16))
    assert "layouts of 16 ranks on dgx_a100" in line
    assert free.recompute.mode == "none"
    [fixed], _ = choose_layouts(
        CONFIG, 16, {"parallel.tp", "recompute.mode", "training.micro_batch_size", "parallel.dp_shard"}
    )
    assert (fixed.parallel.tp, fixed.recompute.mode, fixed.training.micro_batch_size) == (2, "full", 4)
    assert fixed.parallel.dp_shard > 0  # -1 is open
    assert fixed.compile == Compile(block=True, loss=True)  # what "auto" is in this layout on a GPU
    assert replace(fixed, parallel=CONFIG.parallel, compile=CONFIG.compile) == CONFIG  # and nothing else has changed


def test_float8_gets_a_layout_that_it_can_multiply_planned_as_bfloat16() -> None:
    split_backward = replace(CONFIG.parallel, schedule="ZBVZeroBubble", pp=2)
    odd = replace(CONFIG, model=replace(CONFIG.model, ffn=16 * 101), parallel=split_backward)  # / tp 2: no multiple
    float8 = replace(odd, float8=Float8("rowwise"))
    [free], line = choose_layouts(float8, 16, {"parallel.pp"})
    assert not list(problems(free, 16))
    assert line.endswith("; planned with products in bfloat16, not in float8")
    for written in ({"parallel.pp", "parallel.schedule"}, {"parallel.tp"}):
        with pytest.raises(UserError):
            choose_layouts(float8, 16, written)


def test_steps_of_other_sizes_are_planned_together_and_not_as_one() -> None:
    config = Config(cluster=Cluster(name="dgx_h100"), parallel=Parallel(dp_shard=1))
    assert not why_unplanned(config)
    growing = replace(config, data=Data(stage=(MixtureStage(until=9, global_batch_size=4), MixtureStage())))
    assert "this plan is of one size of a step" in why_unplanned(growing)
    assert planned(growing) is None
    with pytest.raises(UserError, match='"tune" measures steps of one size'):
        choose_layouts(growing, 8, (), count=2)
    [chosen], line = choose_layouts(growing, 4, ("parallel.pp", "parallel.cp", "recompute.mode"))
    assert chosen.parallel.dp_shard * chosen.parallel.dp_replicate <= 4  # sequences of the first stage
    assert chosen.parallel.ranks == 4
    assert ": the fastest over 2 stages that 4 ranks on dgx_h100 can have, predicted " in line
    assert not why_unplanned(replace(config, data=Data(stage=(MixtureStage(until=9), MixtureStage()))))


def test_an_unknown_machine_is_not_predicted() -> None:
    assert why_unplanned(replace(CONFIG, parallel=Parallel(dp_shard=16))) == ""
    unknown = replace(CONFIG, cluster=Cluster(), parallel=Parallel(dp_shard=4))  # this_cpu is of eight ranks
    assert why_unplanned(unknown) == "no cluster file describes this machine"
    assert planned(unknown) is None


def test_a_clusters_name_from_the_drivers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchllm.tools.planner.search.auto.DRIVER", tmp_path)
    assert device() == ""
    (tmp_path / "0000:1b:00.0").mkdir()
    (tmp_path / "0000:1b:00.0" / "information").write_text("IRQ: 1\nModel: \t\t NVIDIA H200\nIRQ: 2\n")
    assert device() == "NVIDIA H200"
    assert cluster_with_gpu("NVIDIA A100-SXM4-80GB") == "dgx_a100"
    assert cluster_with_gpu("NVIDIA A100-SXM4-40GB") == "mosaic_a100_40gb"
    assert cluster_with_gpu("NVIDIA H100 80GB HBM3") == "dgx_h100"
    assert cluster_with_gpu("NVIDIA H200") == "hgx_h200"
    assert cluster_with_gpu("NVIDIA B200") == "hgx_b200"
    assert cluster_with_gpu("NVIDIA GeForce RTX 4090") == "rtx_4090"
    assert cluster_with_gpu("") == "this_cpu"
    for gpu in ("NVIDIA H100 PCIe", "NVIDIA A100-PCIE-40GB", "NVIDIA GeForce RTX 4090 D", "NVIDIA GeForce RTX 3090"):
        with pytest.raises(UserError, match=f"has a {gpu}: set cluster.name"):
            cluster_with_gpu(gpu)


def test_a_start_has_a_layout_or_an_error_of_the_key(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NNODES", "1")
    monkeypatch.setenv("NPROC", "7")
    with pytest.raises(SystemExit, match="2"):
        load_configs([str(ROOT / DEBUG), "--parallel.layout=auto", "--check"])
    assert "--parallel.layout: no valid layout on 7 GPUs: " in capsys.readouterr().err
    monkeypatch.setenv("NPROC", "2")
    [config] = load_configs([str(ROOT / DEBUG), "--parallel.layout=auto", "--run.device=cpu", "--run.dry_run=true"])
    assert (config.parallel.layout, config.parallel.ranks) == ("manual", 2)
