"""Blocks of moments in 8 bits (`optim/eightbit.py`). No torch."""

BLOCK = 32
"""elements of a block, which have one float32 scale; layouts have to cut rows into multiples of it"""
SCALE = "_scale"
"""suffix of the name of a moment's scales, after the moment's"""


def has_blocks(shape: tuple[int, ...]) -> bool:
    """Return whether moments of a parameter of this shape are in 8 bits. FSDP cuts vectors anywhere."""
    return len(shape) > 1 and shape[-1] % BLOCK == 0
