"""Multi-token prediction (DeepSeek-V3, arXiv 2412.19437, section 2.2): the additional parameters of its blocks.

Its sizes and costs are added to the mixer's (`registry.mixer`), which is behind it. Names are as
in transformers' `MtpLayer`.
"""

from torchllm.config import Model
from torchllm.facts.parts.costs import MixerCosts, RankShare
from torchllm.facts.parts.part import BlockPart, linear
from torchllm.facts.parts.registry import norm


def costs_of_norms(view: Model, share: RankShare) -> MixerCosts:
    """Return the costs of three norms, and of the input of the projection."""
    return MixerCosts(
        inputs=0.0, results=0.0, kept=4.0 * view.hidden / share.tp, normed=3.0 * view.hidden / share.spread
    )


PART = BlockPart(
    name="multi_token",
    build="torchllm.models.multi_token:predicting",
    parameters=(
        *norm("enorm"),
        *norm("hnorm"),
        *linear("eh_proj", lambda view: (view.hidden, 2 * view.hidden), "rowwise"),
        *norm("post_norm"),
    ),
    needs_last_product=True,
    costs=costs_of_norms,
    styles="torchllm.parallel.multi_token:styles_of_prediction",
    decoder="torchllm.models.multi_token:PredictingDecoder",
)
