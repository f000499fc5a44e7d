"""Describe the findings of a proof: a line for each layout, each fault in one sentence, and where to look."""

import textwrap
from collections import Counter

from torchllm.tools.proof.axes import AFTER_GRADIENTS, RESUMED, TECHNIQUES, TWO_AXES, Technique
from torchllm.tools.proof.compare import BFLOAT16_GROWTH, Verdict
from torchllm.tools.proof.layouts import AXES, ranks_of
from torchllm.tools.proof.prove import ProofOptions, ProvenLayout

LINE = "{:>9} {:>6}  {:<42} {}"
HEADER = LINE.format("error", "s", "worst parameter", "layout")
WIDTH = 88
"""of the paragraphs, in columns"""


class ProofReport:
    """The results of a proof, in words."""

    def __init__(self, options: ProofOptions) -> None:
        self.options = options
        self.results: list[ProvenLayout] = []
        self.by_fault: dict[str, list[ProvenLayout]] = {}
        """layouts that are not right"""

    def having(self, *verdicts: Verdict) -> list[ProvenLayout]:
        """Return the layouts with these verdicts."""
        return [result for result in self.results if result.verdict in verdicts]

    def add(self, result: ProvenLayout) -> str:
        """Return the line of a layout, and a second one if it is not right: the fault, or the first layout with it."""
        self.results.append(result)
        agreement = result.agreement
        error = f"{agreement.error:.1e}" if agreement.error else "same bits"
        in_float64 = f" (in float64; {agreement.rounding:.1e} in float32, by rounding)" if agreement.rounding else ""
        shown = "-" if agreement.refusal else error
        line = LINE.format(shown, f"{result.seconds:.1f}", agreement.parameter, result.name + in_float64)
        if result.is_right:
            return line
        with_fault = self.by_fault.setdefault(agreement.fault, [])
        with_fault.append(result)
        why = f": {agreement.reason}" if len(with_fault) == 1 else f", as {with_fault[0].name}"
        return f"{line}\n{_paragraph(result.verdict + why, '    ')}"

    def summary(self) -> str:
        """Return the verdicts, the layouts of each fault, where to look, and the trials that were left out."""
        lines = [self._verdicts()]
        for first, *others in self.by_fault.values():
            if others:
                lines.append(f"{first.verdict} as {first.name}: " + "; ".join(other.name for other in others))
        wrong = self.having("wrong")
        if any(result.is_alone for result in wrong):
            lines.append("wrong without any parallelism: one process does not agree with itself, so that no layout can")
        lines += advice(wrong)
        if not self.options.only:
            lines += self._left_out()
        elif wrong:
            lines.append("the techniques of this layout were not tried alone: --layouts=0 does")
        return "\n".join(map(_paragraph, lines))

    def _verdicts(self) -> str:
        """Return how many layouts have each verdict, and the worst error of the right ones."""
        counts = Counter(result.verdict for result in self.results)
        words = [f"{counts[verdict]} {verdict}" for verdict in counts if verdict != "right"]
        right = [result.agreement for result in self.results if result.is_right]
        if right:
            worst = max(right, key=lambda agreement: agreement.error)
            text = "the others train" if words else "all train"
            text += f" the model that one process trains, worst gradient error {worst.error:.1e}"
            if self.options.dtype == "bfloat16":
                bound = f"{BFLOAT16_GROWTH} times one process's own error"
                text += f" (allowed were {worst.bound:.1e}: {bound})"
            words.append(text)
        layouts = "1 layout" if len(self.results) == 1 else f"{len(self.results)} layouts"
        what = f"{layouts} of up to {self.options.ranks} ranks in {self.options.dtype}"
        return f"{what}: {', '.join(words)}"

    def _left_out(self) -> list[str]:
        """Return the trials left out because of the number of ranks, or of layouts."""
        lines = []
        ranks_needed = {}
        for technique in TECHNIQUES:
            ranks = ranks_of({**dict.fromkeys(AXES, 1), **technique.settings})
            if ranks > self.options.ranks:
                ranks_needed[technique.name] = ranks
        if ranks_needed:
            lines.append(
                f"not seen with --ranks={self.options.ranks}: a mistake in two axes at once, such as data by a rank "
                f"among all ranks. --ranks={max(ranks_needed.values())} tries " + "; ".join(ranks_needed)
            )
        if len(self.results) == self.options.layouts and self.results[-1].technique not in (None, RESUMED):
            last = self.results[-1].name
            tried = [result.technique for result in self.results]
            untried = [technique for technique in TECHNIQUES if technique.hint == TWO_AXES and technique not in tried]
            pairs = [technique.name for technique in untried if technique.name not in ranks_needed]
            two_axes = f" Not seen: a mistake in two axes at once, as in {'; '.join(pairs)}." if pairs else ""
            ends = f"--layouts={self.options.layouts} ends with {last}."
            lines.append(f"{ends}{two_axes} --layouts=0 tries each technique alone")
        return lines


def _paragraph(text: str, indent: str = "") -> str:
    """Return a text in lines that fit."""
    following = f"{indent}    "
    return textwrap.fill(text, WIDTH, initial_indent=indent, subsequent_indent=following, break_on_hyphens=False)


def advice(wrong: list[ProvenLayout]) -> list[str]:
    """Return where to look, by the wrong layouts."""
    elsewhere = [result for result in wrong if result.technique is RESUMED or not result.agreement.is_after_gradients]
    lines = [f"{technique.name}: {technique.hint}" for technique in culprits(elsewhere)]
    return lines if len(elsewhere) == len(wrong) else [*lines, AFTER_GRADIENTS]


def culprits(wrong: list[ProvenLayout]) -> list[Technique]:
    """Return the techniques that make layouts wrong: those that are wrong alone, else all of a wrong layout."""
    alone = [(result.technique, result.config) for result in wrong if result.technique is not None]
    if alone:  # of tp, and tp with sequence parallelism, the first says enough
        causes = []
        for technique, config in alone:
            if not any(other.is_used(config) for other, _ in alone if other is not technique):
                causes.append(technique)
        return causes
    found: dict[str, Technique] = {}
    for result in wrong[:1]:
        for technique in TECHNIQUES:
            if technique.is_used(result.config):
                found[technique.name] = technique
    return list(found.values())
