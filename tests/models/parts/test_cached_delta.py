"""Generation with a state is the computation of whole texts."""

import pytest
import torch

from torchllm.config import Kinds, Model
from torchllm.models.decoder import build_model
from torchllm.models.mixer import Mixer
from torchllm.models.parts.cached_delta import CachedDelta
from torchllm.tools.continue_texts import caching

LENGTH = 75  # more than a chunk
KINDS = {"recurrent": {"mixer": "gated_delta"}, "full": {}}
SIZES = {"layers": 3, "hidden": 16, "heads": 4, "kv_heads": 2, "ffn": 24, "vocab": 31}


@pytest.mark.parametrize("prompt", [1, 2, 70])
@pytest.mark.parametrize("padding", [0, 1])
def test_one_token_at_a_time_is_the_whole_computation(prompt: int, padding: int) -> None:
    """The second text may have one token less, behind padding that the convolution must not see."""
    model = build_model(Model(**SIZES, pattern=("recurrent", "recurrent", "full"), kinds=Kinds(KINDS))).double()
    generator = torch.Generator().manual_seed(0)
    prompt += padding
    begins = torch.tensor([[0], [padding]])
    tokens = torch.randint(31, (2, LENGTH), generator=generator)
    positions = torch.arange(LENGTH) - begins
    is_padding = positions < 0
    documents = (~is_padding).long() if padding else None
    positions = positions.clamp(min=0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(std=0.5, generator=generator)
        expected = model(tokens, positions, documents)
        with caching(model, room=LENGTH, padding=is_padding[:, :prompt] if padding else None):
            for begin, end in ((0, prompt), *((i, i + 1) for i in range(prompt, LENGTH))):
                ids = documents[:, :prompt] if documents is not None and begin == 0 else None
                logits = model(tokens[:, begin:end], positions[:, begin:end], ids)
                torch.testing.assert_close(logits[:, 0], expected[:, end - 1], rtol=1e-10, atol=1e-10)
            cores = [layer.core for layer in model.modules() if isinstance(layer, Mixer)]
    recurrent = [core for core in cores if isinstance(core, CachedDelta)]
    assert len(recurrent) == 2
    for core in recurrent:
        assert core.state is not None
        assert core.state.shape == (2, 2, 2, 4, 4)
        assert [x.shape[1] for x in core.before] == [3, 3, 3]
