"""The registries of readers and tokenizers: what the core reads alone, and what tools add."""

import subprocess
import sys
from typing import get_args, get_type_hints

from tests.tiny_run import ROOT
from torchllm.config import Source
from torchllm.config.schema import IN_PLACE_KINDS, RAW_KINDS
from torchllm.data.readers import reader_of
from torchllm.data.registry import READERS
from torchllm.tools.prepare.formats.in_place import InPlaceReader
from torchllm.tools.prepare.readers import RawReader


def test_each_kind_of_the_config_has_its_reader() -> None:
    assert READERS.keys() == set(get_args(get_type_hints(Source)["kind"]))
    for kind in RAW_KINDS:
        assert isinstance(reader_of(kind), RawReader)
    for kind in IN_PLACE_KINDS:
        assert isinstance(reader_of(kind), InPlaceReader)


def test_the_core_reads_prepared_tokens_and_the_face_of_recipes_adds_the_rest() -> None:
    program = """
import sys
from torchllm.config.errors import DataError
from torchllm.data.readers import READERS, reader_of
from torchllm.data.tokenizer import TOKENIZERS, load_tokenizer
assert READERS.keys() == {"tokens", "synthetic"} and not TOKENIZERS
for read in (lambda: reader_of("text"), lambda: load_tokenizer("docs/config.schema.json")):
    try:
        read()
    except DataError as error:
        assert "has no reader: import torchllm.recipe" in str(error)
    else:
        raise AssertionError
import torchllm.recipe
assert "text" in READERS and "mds" in READERS and TOKENIZERS.keys() == {"tokenizer.json"}
assert not any(name.startswith("torchllm.tools.") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
