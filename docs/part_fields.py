"""Print what a part of a block declares: the fields of `BlockPart`. docs/add_a_part.md quotes it.

python -m docs.part_fields
"""

import textwrap

from torchllm.facts.parts.part import BlockPart
from torchllm.tools.config.help import WIDTH, field_docs

INDENT = 24

if __name__ == "__main__":
    for name, text in field_docs(BlockPart).items():
        print(textwrap.fill(f"{name:{INDENT}}{' '.join(text.split())}", WIDTH, subsequent_indent=" " * INDENT))
