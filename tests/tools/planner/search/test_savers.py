"""Settings that free memory, by the planner's figures."""

from dataclasses import replace
from pathlib import Path

from tests.tiny_run import ROOT
from torchllm.config import Cluster, Config, Model, Optimizer, Parallel, Recompute, Training
from torchllm.tools.planner.search.auto import planned
from torchllm.tools.planner.search.explain import GIB
from torchllm.tools.planner.search.savers import savers

CLUSTERS = ROOT / "train_configs/clusters"
LLAMA = Config(
    cluster=Cluster("dgx_a100"),
    model=Model(layers=32, hidden=4096, heads=32, ffn=11008, vocab=32000),
    training=Training(micro_batch_size=4, global_batch_size=64, sequence_length=2048),
    parallel=Parallel(dp_shard=8),
)


def settings(config: Config) -> list[str]:
    return [saver.setting for saver in savers(config, count=20)]


def test_they_free_what_they_say() -> None:
    best_first = savers(LLAMA, count=20)
    freed = [saver.freed for saver in best_first]
    assert freed == sorted(freed, reverse=True)
    by_setting = {saver.setting: saver for saver in best_first}
    assert "--training.micro_batch_size=2" in by_setting
    assert "--parallel.tp=2 --parallel.dp_shard=4" in by_setting

    full = by_setting["--recompute.mode=full"]
    usual = planned(LLAMA)
    recomputed = planned(replace(LLAMA, recompute=Recompute("full")))
    assert usual is not None
    assert recomputed is not None
    assert full.freed == usual.memory.total - recomputed.memory.total
    assert full.freed > 10 * GIB
    assert full.slower == recomputed.step / usual.step
    assert full.slower > 1.1
    assert by_setting["--optimizer.offload=true"].freed > by_setting["--optimizer.state_dtype=bfloat16"].freed
    assert by_setting["--optimizer.offload=true"].slower > 1
    assert "--training.weights_dtype=bfloat16" in by_setting
    assert "--optimizer.ema_offload=true" not in by_setting
    assert "--optimizer.ema_offload=true" in settings(replace(LLAMA, optimizer=Optimizer(ema_decay=0.999)))
    assert "--recompute.offload=true" in settings(replace(LLAMA, recompute=Recompute("full")))
    assert str(full).startswith("--recompute.mode=full frees ")


def test_three_that_free_something_and_that_the_config_accepts() -> None:
    assert len(savers(LLAMA)) == 3
    odd_heads = replace(LLAMA.model, heads=31, hidden=31 * 128)  # tp 2 does not divide them
    for setting in settings(replace(LLAMA, model=odd_heads)):
        assert "tp" not in setting
    one_sequence = replace(LLAMA.training, micro_batch_size=1)
    thrifty = replace(LLAMA, recompute=Recompute("full"), training=one_sequence)
    for setting in settings(thrifty):
        assert "recompute.mode" not in setting
        assert "micro" not in setting
    assert "--parallel.sequence_parallel=true" in settings(replace(LLAMA, parallel=Parallel(dp_shard=4, tp=2)))
    unknown = replace(LLAMA, cluster=Cluster(), parallel=Parallel(dp_shard=4))  # this_cpu is of eight ranks
    assert savers(unknown) == []


def test_what_the_host_cannot_hold_saves_nothing(tmp_path: Path) -> None:
    small = tmp_path / "small.toml"
    small.write_text(f'base = "{CLUSTERS}/dgx_a100.toml"\n[host]\ncapacity = 1e9\n')
    of_small = settings(replace(LLAMA, cluster=Cluster(str(small))))
    assert set(settings(LLAMA)) - set(of_small) == {"--optimizer.offload=true"}
    offloaded = replace(LLAMA, cluster=Cluster(str(small)), optimizer=Optimizer(offload=True))
    assert "--recompute.mode=full" in settings(offloaded)  # such a run has room, whatever the file says
