"""Write the drawings of the documentation: `python docs/drawings.py`. A test compares the files with them."""

import ast
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

from torchllm.config import Model
from torchllm.facts.flops import parameter_count

BARS_START = 150.0
"""where the bars of the ZeRO stages begin: right of their longest label"""
IMAGES = Path(__file__).parent / "images"
LIBRARY = Path(__file__).parents[1] / "torchllm"
BLUE, ORANGE, GREEN, GREY, LIGHT = "#4c78a8", "#f58518", "#54a24b", "#bab0ac", "#f0eeec"


class Box(NamedTuple):
    """A rectangle with centered text, in pixels."""

    x: float
    y: float
    width: float
    height: float
    color: str
    text: str = ""


class Label(NamedTuple):
    """Text that starts at (x, y)."""

    x: float
    y: float
    text: str


class Arrow(NamedTuple):
    """A line with a head at its end."""

    x1: float
    y1: float
    x2: float
    y2: float


def svg(width: int, height: int, boxes: Sequence[Box], labels: Sequence[Label], arrows: Sequence[Arrow] = ()) -> str:
    """Return an SVG picture; the arrows are behind the boxes."""
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        "<style>text { font: 13px sans-serif; fill: #222 } .in { fill: white; text-anchor: middle }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    if arrows:
        lines.append(
            '<marker id="head" viewBox="0 0 8 8" refX="8" refY="4" markerWidth="8" markerHeight="8" orient="auto">'
            f'<path d="M0 0 8 4 0 8z" fill="{GREY}"/></marker>'
        )
    for arrow in arrows:
        place = f'x1="{arrow.x1:g}" y1="{arrow.y1:g}" x2="{arrow.x2:g}" y2="{arrow.y2:g}"'
        lines.append(f'<line {place} stroke="{GREY}" stroke-width="1.5" marker-end="url(#head)"/>')
    for box in boxes:
        place = f'x="{box.x:g}" y="{box.y:g}" width="{box.width:g}" height="{box.height:g}"'
        lines.append(f'<rect {place} rx="3" fill="{box.color}"/>')
        if box.text:
            middle = (box.x + box.width / 2, box.y + box.height / 2 + 4)
            lines.append(f'<text class="in" x="{middle[0]:g}" y="{middle[1]:g}">{box.text}</text>')
    for label in labels:
        lines.append(f'<text x="{label.x:g}" y="{label.y:g}">{label.text}</text>')
    return "\n".join([*lines, "</svg>\n"])


def draw_overview() -> str:
    """Draw one TOML file and the commands that read it."""
    uses = [
        ("plan", "which layout is fastest, before a GPU is rented", BLUE),
        ("dry run", "what each of 16,384 ranks would hold and send, on a laptop", BLUE),
        ("prove", "every layout has the gradients of one process", GREEN),
        ("run", "laptop, GPU box, Slurm, Kubernetes: the same command", ORANGE),
        ("sweep", "measure layouts; the plan learns from the results", ORANGE),
    ]
    boxes = [Box(10, 80, 130, 60, GREY, "run.toml")]
    labels = []
    for row, (name, meaning, color) in enumerate(uses):
        boxes.append(Box(200, 12 + 40 * row, 90, 30, color, name))
        boxes.append(Box(140, 26 + 40 * row, 60, 2, GREY))
        labels.append(Label(305, 32 + 40 * row, meaning))
    boxes.append(Box(140, 26, 2, 162, GREY))
    return svg(720, 220, boxes, labels)


def draw_layout() -> str:
    """Draw the ranks of pp 2, dp_shard 2, tp 2: two nodes of four GPUs, and the data of each rank."""
    nodes = [Box(10 + 420 * stage, 10, 370, 270, LIGHT) for stage in range(2)]
    labels = [Label(25 + 420 * stage, 30, f"node {stage}: pipeline stage {stage}") for stage in range(2)]
    boxes = [Box(380, 144, 50, 2, GREY)]
    labels.append(Label(397, 138, "pp"))
    for rank in range(8):
        stage, shard, part = rank // 4, rank // 2 % 2, rank % 2
        x, y = 20 + 420 * stage + 195 * part, 40 + 130 * shard
        boxes.append(Box(x, y, 155, 95, [BLUE, ORANGE][shard]))
        lines = [
            f"rank {rank}",
            f"blocks {16 * stage} to {16 * stage + 15}",
            f"{['left', 'right'][part]} half of matrices",
            f"sequences {'AB'[shard]}, shard {'AB'[shard]}",
        ]
        boxes += [Box(x, y + 10 + 19 * line, 155, 17, "none", text) for line, text in enumerate(lines)]
        if part == 0:
            boxes.append(Box(x + 155, y + 46, 40, 2, GREY))
            labels.append(Label(x + 168, y + 40, "tp"))
        if shard == 0:
            boxes.append(Box(x + 76, y + 95, 2, 35, GREY))
            labels.append(Label(x + 84, y + 117, "dp_shard"))
    return svg(810, 290, [*nodes, *boxes], labels)


def draw_zero_stages() -> str:
    """Draw bytes per rank of an 8B model on 8 ranks, by ZeRO stage: float32 weights, gradients and moments."""
    model = Model(layers=32, hidden=4096, heads=32, kv_heads=8, ffn=14336, vocab=128256)
    whole = 4 * parameter_count(model) / 2**30
    shard = whole / 8
    copy = whole / 2
    held = [
        ("0 (DDP)", [whole, copy, whole, 2 * whole]),
        ("1", [shard, copy, whole, 2 * shard]),
        ("2", [shard, copy, shard, 2 * shard]),
        ("3", [shard, 0.0, shard, 2 * shard]),
    ]
    names = ["weights", "gathered bfloat16 weights", "gradients", "optimizer moments"]
    colors = [BLUE, GREY, ORANGE, GREEN]
    boxes = []
    labels = []
    for row, (stage, parts) in enumerate(held):
        y = 45 + 40 * row
        x = BARS_START
        labels.append(Label(10, y + 20, f"zero_stage {stage}"))
        for part, color in zip(parts, colors, strict=True):
            width = 4 * part
            if width:
                boxes.append(Box(round(x, 1), y, round(width, 1), 30, color))
            x += width
        labels.append(Label(round(x + 8, 1), y + 20, f"{sum(parts):.0f} GiB"))
    x = BARS_START
    for name, color in zip(names, colors, strict=True):
        boxes.append(Box(x, 15, 12, 12, color))
        labels.append(Label(x + 18, 26, name))
        x += 40 + 7 * len(name)
    return svg(760, 215, boxes, labels)


def imports_of_folders() -> dict[str, set[str]]:
    """Return which folders each folder imports, as the docstring of its __init__.py ends, which a test holds."""
    imports = {}
    for init in sorted([*LIBRARY.glob("*/__init__.py"), *LIBRARY.glob("tools/*/__init__.py")]):
        docstring = " ".join((ast.get_docstring(ast.parse(init.read_text())) or "").split())
        _, found, named = docstring.removesuffix(".").partition("Imports: ")
        if found:
            imports[init.parent.relative_to(LIBRARY).as_posix()] = set(named.split(", "))
    return {folder: named & imports.keys() for folder, named in imports.items()}


def draw_rooms() -> str:
    """Draw the folders of the library, each above those that it imports."""
    imports = imports_of_folders()

    @cache
    def reached(folder: str) -> frozenset[str]:
        return frozenset(imports[folder]).union(*map(reached, imports[folder]))

    @cache
    def level(folder: str) -> int:
        return 1 + max(map(level, imports[folder]), default=-1)

    top = max(map(level, imports))
    boxes: dict[str, Box] = {}
    for row in range(top + 1):
        for is_tool, left, width in ((False, 10.0, 230.0), (True, 300.0, 450.0)):
            here = [folder for folder in imports if level(folder) == row and folder.startswith("tools/") == is_tool]
            for column, folder in enumerate(here):
                aside = 60 * (row % 3 - 1) if is_tool and len(here) == 1 else 0  # else arrows hide behind boxes
                x = left + width * (column + 0.5) / len(here) - 50 + aside
                name = folder.removeprefix("tools/")
                boxes[folder] = Box(round(x, 1), 40.0 + 46 * (top - row), 100, 28, ORANGE if is_tool else BLUE, name)
    labels = [Label(10, 24, "core: torchllm/"), Label(300, 24, "tools: torchllm/tools/")]
    return svg(760, 46 * top + 80, list(boxes.values()), labels, _arrows(imports, boxes, reached))


def _arrows(
    imports: Mapping[str, set[str]], boxes: Mapping[str, Box], reached: Callable[[str], frozenset[str]]
) -> list[Arrow]:
    """Return an arrow for each import that no other import of the folder leads to."""
    arrows = []
    for folder, named in imports.items():
        for other in sorted(named):
            if not any(other in reached(between) for between in named):
                above, below = boxes[folder], boxes[other]
                arrows.append(Arrow(above.x + 50, above.y + 28, below.x + 50, below.y))
    return arrows


def drawings() -> dict[str, str]:
    """Return the text of each picture by file name."""
    return {
        "overview.svg": draw_overview(),
        "layout.svg": draw_layout(),
        "zero_stages.svg": draw_zero_stages(),
        "rooms.svg": draw_rooms(),
    }


if __name__ == "__main__":
    for name, text in drawings().items():
        (IMAGES / name).write_text(text)
