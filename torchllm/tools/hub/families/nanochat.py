"""nanochat (Karpathy 2025): norms without weights, one of them of the embeddings, and a feed-forward layer of two
matrices with the square of ReLU between them.

Its rotary positions turn backwards. To turn forwards with the halves of each head swapped is the same, so the rows of
its q and k are swapped. Its norms of q and k come after the rotation, and divide by the same numbers as before it.
"""

from torchllm.config import Model
from torchllm.tools.hub.families.family import ConfigField, HubFamily, RequiredField, TensorRule
from torchllm.tools.hub.families.llama import ATTENTION_TENSORS, ENDS, MLP, NO_ATTENTION_BIAS, decoder_fields


# Functions with names: a table is sent to the other ranks, and a lambda cannot be pickled.
def halves_of_query_heads(view: Model) -> int:
    return 2 * view.heads


def halves_of_key_heads(view: Model) -> int:
    return 2 * view.kv


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
    norms_after_rotation=True,
)
