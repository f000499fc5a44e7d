"""Multi-token prediction under each technique: gradients equal one process, parameter by parameter.

Values of one process, and tokens and labels ahead: tests/models/test_multi_token.py, tests/data/test_packing.py.
Others: the lattice, whose sample has each pair of a setting and mtp_depth.
"""

from tests.parallel import tiers
from tests.parity import Settings, check
from torchllm.config import Kinds

DEPTHS: Settings = {"model.mtp_depth": 2, "model.mtp_weight": 0.7}
MIXTURE: Settings = {
    **{"model.experts": 4, "model.top_k": 2, "model.expert_ffn": 48, "model.dense_layers": 1},
    **{"model.router_bias": True, "model.balance_loss": "sequence", "model.balance_weight": 0.3},
}
DOCUMENTS: Settings = {"data.document_mask": True}
SP: Settings = {"parallel.tp": 2, "parallel.sequence_parallel": True}
CHUNKS: Settings = {"training.loss_chunk": 24, "training.z_loss": 0.02}
BY_DEFAULT: dict[str, Settings] = {
    "tensor and sequence parallel": {**SP, **DOCUMENTS},
    "ring": {"parallel.cp": 2, **DOCUMENTS},
    "FSDP": {"parallel.dp_shard": 2, **CHUNKS},
    "expert parallel": {"parallel.dp_shard": 2, "parallel.ep": 2, **MIXTURE},
}
LAYOUTS: dict[str, Settings] = {
    "compiled blocks": {"parallel.dp_shard": 2, "compile.block": True, "compile.loss": True},
    "compiled blocks over tp": {**SP, "compile.block": True},
    "compiled parts of experts over tp": {**SP, **MIXTURE, "compile.block": True},
    "kinds of blocks": {"parallel.pp": 2, "model.pattern": ("a", "b"), "model.kinds": Kinds(a={"window": 7}, b={})},
}


@tiers.train(BY_DEFAULT, LAYOUTS)
def test_a_layout_trains_the_same(settings: Settings) -> None:
    check({**DEPTHS, **settings}, ragged=True)
