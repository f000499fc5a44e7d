"""The sources of data that a run has noted for its report: `sources.txt` of the run folder. No torch."""

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torchllm.runtime.tolerance import Tolerance

if TYPE_CHECKING:
    from torchllm.data.corpus_header import CorpusHeader

SOURCES = "sources.txt"
"""a line per source, with its size"""


def note_sources(file: Path, lines: list[str], corpora: Mapping[str, "CorpusHeader"]) -> None:
    """Write the lines on the sources to a file for the report, with the bytes of text of a corpus."""
    noted = []
    for line in lines:
        header = corpora.get(line.partition(": ")[0])
        noted.append(f"{line}; {header.text_bytes / 1e6:,.1f} MB of text\n" if header is not None else f"{line}\n")
    with Tolerance(str(file)).attempt():
        file.write_text("".join(noted), encoding="utf-8")
