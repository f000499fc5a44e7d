"""nanochat (Karpathy 2025): norms without weights, one of them of the embeddings, and a feed-forward layer of two
matrices with the square of ReLU between them.

Its rotary positions turn backwards, which is to turn forwards with the halves of each head swapped: so the rows of its
q and k are read. Its norms of q and k come after the rotation, which does not change what they divide by.
"""

from collections.abc import Mapping
from typing import Any

from torchllm.config import Model
from torchllm.tools.hub.families.family import ConfigField, FieldError, HubFamily, RequiredField, TensorRule
from torchllm.tools.hub.families.llama import ATTENTION_TENSORS, ENDS, MLP, NO_ATTENTION_BIAS, decoder_fields


# Functions with names: a table is sent to the other ranks, and a lambda cannot be pickled.
def halves_of_query_heads(view: Model) -> int:
    return 2 * view.heads


def halves_of_key_heads(view: Model) -> int:
    return 2 * view.kv


def without_yarn(fields: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields. Raises FieldError for YaRN, whose factor of q and k such norms divide out."""
    for name in ("rope_parameters", "rope_scaling"):
        table = fields.get(name)
        if isinstance(table, dict) and "yarn" in (table.get("rope_type"), table.get("type")):
            raise FieldError(f"{name}.rope_type: 'yarn' is not supported in this type: norms divide its factor out")
    return dict(fields)


QUERIES, KEYS, VALUES, OUTPUT = ATTENTION_TENSORS
NANOCHAT = HubFamily(
    model_type="nanochat",
    architecture="NanoChatForCausalLM",
    features={"family": "nanochat", "qk_norm": "head"},
    fields=(
        *decoder_fields(vocab=50304, ffn=8192, kv_heads=None, length=2048, layers=12, hidden=768, heads=6),
        ConfigField("final_logit_softcapping", "logit_softcap", 15.0),
    ),
    required=(
        RequiredField("hidden_act", ("relu2",), "another activation of the feed-forward layer"),
        NO_ATTENTION_BIAS,
    ),
    prepared=without_yarn,
    tensors=(
        ENDS[0],
        ENDS[2],
        QUERIES._replace(groups=halves_of_query_heads, swaps=True),
        KEYS._replace(groups=halves_of_key_heads, swaps=True),
        VALUES,
        OUTPUT,
        TensorRule(MLP + "fc1.weight", ("layers.{}.mlp.up_proj.weight",)),
        TensorRule(MLP + "fc2.weight", ("layers.{}.mlp.down_proj.weight",)),
    ),
    has_no_old_rope=True,
)
