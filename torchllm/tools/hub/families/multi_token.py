"""Multi-token prediction: fields and tensors that families share."""

from torchllm.tools.hub.families.family import ConfigField, TensorRule

MTP_TENSORS = tuple(
    TensorRule(f"model.layers.{{}}.{key}.weight", (f"layers.{{}}.{name}.weight",))
    for key, name in {"enorm": "enorm", "hnorm": "hnorm", "eh_proj": "eh_proj", "shared_head.norm": "post_norm"}.items()
)
MTP_COPIES = r"layers\.\d+\.(embed_tokens|shared_head\.head)\.weight"
"""copies of embedding and head in the blocks of multi-token prediction: no class of transformers reads them"""
MTP_DEPTH = ConfigField("num_nextn_predict_layers", "mtp_depth", 1, is_fixed=False, aliases=("num_mtp_layers",))
