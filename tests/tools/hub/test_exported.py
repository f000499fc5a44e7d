"""The rows of an exported embedding."""

import pytest

from torchllm.config import Model
from torchllm.tools.hub.exported import PublishedOrigin, has_its_tokenizer, without_padding


@pytest.mark.parametrize(
    ("vocab", "tokenizer", "published", "rows"),
    [
        (128_256, 128_000, 0, 128_000),  # rows that were there for the ranks
        (128_256, 100_000, 0, 128_256),  # of another tokenizer
        (151_936, 151_665, 151_936, 151_936),  # as published
        (152_064, 152_000, 151_936, 152_000),  # tokens were added
        (153_600, 152_000, 151_936, 152_000),  # and more rows than a tokenizer may lack
        (153_600, 160_000, 151_936, 151_936),  # of another tokenizer
    ],
)
def test_rows_of_tokens_are_kept(vocab: int, tokenizer: int, published: int, rows: int) -> None:
    origin = PublishedOrigin(vocab=published)
    assert without_padding(Model(vocab=vocab), tokenizer, origin).vocab == rows


def test_the_tokenizer_of_gpt_oss_is_its_own() -> None:
    assert has_its_tokenizer(Model(vocab=201_088), 200_019)
    assert not has_its_tokenizer(Model(vocab=201_088), 128_256)
