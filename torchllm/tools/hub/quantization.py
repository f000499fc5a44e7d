"""How the values of a model's tensors lie in its files: as they are, or quantized. No torch.

A method of quantization is a class here, which names the tensors of a file that hold one of the model's; a row of
`METHODS`; and a function of `dequantize.py`, which makes the values of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torchllm.tools.hub.families.family import FieldError, StoredTensor
from torchllm.tools.hub.safetensors_header import FileTensor

FIELD = "quantization_config"
PLAIN_DTYPES = ("F64", "F32", "F16", "BF16")
"""of weights that are not quantized, as safetensors names them"""
FLOAT8 = "F8_E4M3"
MXFP4_BLOCK = 32
"""values with one scale"""


class FilePiece(NamedTuple):
    """A tensor of a file that holds values of a model's tensor, alone or with others."""

    key: str
    shape: tuple[int, ...]
    columns: int
    """of its elements, seen as a matrix with contiguous rows"""
    dtypes: tuple[str, ...]
    """it has one of them, as safetensors names them"""


class Storage(NamedTuple):
    """The stored form of one tensor of a model."""

    method: "Quantization"
    """method that `dequantize.decode` uses"""
    pieces: tuple[FilePiece, ...]
    """as it takes them"""
    rows: int = 1
    """of the tensor, seen as a matrix, that are made of the same bytes"""


class Quantization(Protocol):
    """A method of storing the tensors of a model."""

    def storage_of(self, stored: StoredTensor, tensors: Mapping[str, FileTensor]) -> Storage:
        """Return the stored form of a tensor. tensors: of the model's files, by key."""


@dataclass(frozen=True)
class Plain:
    """Files with the weights as they are."""

    def storage_of(self, stored: StoredTensor, tensors: Mapping[str, FileTensor]) -> Storage:
        return Storage(self, (FilePiece(stored.key, stored.shape, stored.columns, PLAIN_DTYPES),))


@dataclass(frozen=True)
class BlockFloat8:
    """Matrices in float8_e4m3fn with a scale per block that multiplies its values (DeepSeek-AI 2024,
    arXiv 2412.19437, section 3.3). Blocks at the border are cut. Tensors of another dtype are stored as they are.

    `quant_method` "fp8" of DeepSeek-V3, Kimi K2, MiniMax-M2 and Qwen3.
    """

    block_rows: int
    block_columns: int

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "BlockFloat8":
        """Return the method that a quantization_config describes. Raises FieldError."""
        size = fields.get("weight_block_size")
        if not isinstance(size, list) or len(size) != 2 or not all(type(side) is int and side > 0 for side in size):
            raise FieldError(
                f"{FIELD}.weight_block_size: is {size!r}: float8 weights can be read that have a scale per block, such "
                f"as [128, 128]; {TAKE_ORIGINAL}"
            )
        return cls(*size)

    def storage_of(self, stored: StoredTensor, tensors: Mapping[str, FileTensor]) -> Storage:
        if stored.key not in tensors or tensors[stored.key].dtype != FLOAT8 or len(stored.shape) < 2:
            return Plain().storage_of(stored, tensors)
        *stack, rows, columns = stored.shape
        blocks = (*stack, -(-rows // self.block_rows), -(-columns // self.block_columns))
        weight = FilePiece(stored.key, stored.shape, stored.columns, (FLOAT8,))
        scale = FilePiece(f"{stored.key}_scale_inv", blocks, blocks[-1], ("F32", "BF16"))
        return Storage(self, (weight, scale))

    def scale_row(self, row: int, rows: int) -> int:
        """Return the row of scales for a row of weights. rows: of a matrix; a stack has one after the other."""
        matrix, row_of_matrix = divmod(row, rows)
        return matrix * -(-rows // self.block_rows) + row_of_matrix // self.block_rows


@dataclass(frozen=True)
class Mxfp4:
    """Matrices of experts in 4 bits, two values a byte, and a power of 2 for each 32 of a row that follow each other
    (Open Compute Project, Microscaling Formats 1.0, section 5.3). Other tensors are as they are.

    `quant_method` "mxfp4" of gpt-oss: a file has blocks (E, N, M / 32, 16) and scales (E, N, M / 32) for an
    unquantized (E, M, N).
    """

    @classmethod
    def read(cls, fields: Mapping[str, Any]) -> "Mxfp4":
        return cls()

    def storage_of(self, stored: StoredTensor, tensors: Mapping[str, FileTensor]) -> Storage:
        blocks = f"{stored.key}_blocks"
        if blocks not in tensors or not stored.is_transposed or stored.shape[-2] % MXFP4_BLOCK:
            return Plain().storage_of(stored, tensors)
        *stack, inputs, outputs = stored.shape
        scales_shape = (*stack, outputs, inputs // MXFP4_BLOCK)
        values = FilePiece(blocks, (*scales_shape, MXFP4_BLOCK // 2), inputs // 2, ("U8",))
        scales = FilePiece(f"{stored.key}_scales", scales_shape, scales_shape[-1], ("U8",))
        return Storage(self, (values, scales), MXFP4_BLOCK)


METHODS: dict[str, Callable[[Mapping[str, Any]], Quantization]] = {
    "fp8": BlockFloat8.read,
    "mxfp4": Mxfp4.read,
}
"""quant_method of config.json -> function that reads the other fields"""
TAKE_ORIGINAL = (
    "take a repository with the original weights, or let transformers write them: from_pretrained with the method's "
    "option `dequantize`, if it has one, then save_pretrained"
)


def read_quantization(fields: Any) -> Quantization:
    """Return how the files of a model store its tensors. fields: quantization_config, None if it has none.

    Raises FieldError if they cannot be read.
    """
    if not fields:
        return Plain()
    method = fields.get("quant_method") if isinstance(fields, Mapping) else None
    if method not in METHODS:
        known = ", ".join(METHODS)
        raise FieldError(f"{FIELD}.quant_method: {method!r} cannot be read (supported: {known}): {TAKE_ORIGINAL}")
    return METHODS[method](fields)
