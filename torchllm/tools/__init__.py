"""What starts, plans, proves, watches or converts a run. The core imports none of it.

What computes a step is in the folders of torchllm itself. The core reads prepared tokens; what else it can read is
registered here. A folder may import the core, and others in the order of tests/test_architecture.py.
"""

from typing import Any

from torchllm.data.registry import READERS, TOKENIZERS


# Each is imported at the first source or tokenizer of its kind: most runs read prepared tokens.
def _raw_reader() -> Any:
    from torchllm.tools.prepare.readers import RawReader

    return RawReader()


def _in_place_reader() -> Any:
    from torchllm.tools.prepare.formats.in_place import InPlaceReader

    return InPlaceReader()


def _hugging_face_tokenizer(*arguments: Any) -> Any:
    from torchllm.tools.prepare.hugging_face_tokenizer import HuggingFaceTokenizer

    return HuggingFaceTokenizer(*arguments)


READERS |= dict.fromkeys(("stdlib", "text", "jsonl", "parquet", "hub"), _raw_reader)
READERS |= dict.fromkeys(("megatron", "llmc", "nanogpt", "mds"), _in_place_reader)
TOKENIZERS["tokenizer.json"] = _hugging_face_tokenizer
