"""Explain a search in words: a table of its layouts, why the first is first, what to change if nothing fits.

No torch. Every sentence states predictions: the winner's, and those of layouts that differ from it in one setting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.bounds import at_least
from torchllm.planner.search.layouts import MODES, DegreeMesh, Job, Layout
from torchllm.planner.search.price import NO_PURCHASE, Purchase, bill
from torchllm.planner.search.search import Found, Ranked, search
from torchllm.planner.search.validity import judge

GIB = 2**30
FURTHER = (2, 4, 8, 16, 32)
"""factors by which GPUs are added, or sequences shortened, to find something that fits"""
DEGREES = ("pp", "data", "cp", "tp")
"""fields of `DegreeMesh`"""


def layout_figures(job: Job, ranked: Ranked, purchase: Purchase = NO_PURCHASE) -> dict[str, Any]:
    """Return the figures of one layout: seconds, GiB, shares of 1, dollars."""
    prediction = ranked.prediction
    verdict = judge(job.case(ranked.layout), prediction)
    tokens_per_step = job.training.global_batch_size * job.training.sequence_length
    figures: dict[str, Any] = {
        "gpus": job.gpus,
        "layout": ranked.layout._asdict(),
        "step_seconds": prediction.step,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "memory_gib": prediction.memory.total / GIB,
        "fits": verdict.fits,
        "out_of_memory": verdict.out_of_memory,
        "tokens_per_second": tokens_per_step / prediction.step,
        "petaflops": prediction.mfu * job.gpus * job.hardware.peak.bfloat16 / 1e15,
        "terms": prediction.terms,
        "memory": {name: held / GIB for name, held in prediction.memory._asdict().items()},
    }
    if purchase.tokens:
        training = bill(purchase, prediction.step, tokens_per_step, job.gpus)
        figures["days"] = training.days
        figures["gpu_hours"] = training.gpu_hours
        if purchase.dollars_per_gpu_hour:
            figures["dollars"] = training.dollars
    return figures


def _budget_heading(purchase: Purchase) -> str:
    """Return the titles of the columns of `_budget`."""
    if not purchase.tokens:
        return ""
    return "   days   GPU-hours" + ("           $" if purchase.dollars_per_gpu_hour else "")


def _budget(figures: dict[str, Any]) -> str:
    """Return what the whole training costs; empty if its tokens are unknown."""
    if "days" not in figures:
        return ""
    price = f" {figures['dollars']:11,.0f}" if "dollars" in figures else ""
    return f" {figures['days']:6.1f} {figures['gpu_hours']:11,.0f}{price}"


def ranking_table(job: Job, best: Sequence[Ranked], purchase: Purchase = NO_PURCHASE) -> Iterator[str]:
    """Yield a heading, then two lines per layout: what it costs and is; where its time goes, the largest term first."""
    shares = f"{'MFU':>6} {'HFU':>6}"
    budget = _budget_heading(purchase)
    yield f"{'':3} {'step s':>8} {shares} {'GiB':>6} {'':7} {'tokens/s':>10} {'PFLOP/s':>8}{budget}  layout"
    for number, ranked in enumerate(best, start=1):
        row = layout_figures(job, ranked, purchase)
        yield (
            f"{number:2}. {row['step_seconds']:8.4g} {row['mfu']:6.1%} {row['hfu']:6.1%} {row['memory_gib']:6.1f} "
            f"{row['fits']:7} {row['tokens_per_second']:10,.0f} {row['petaflops']:8.4g}{_budget(row)}  "
            f"{ranked.layout.text()}"
        )
        yield f"{'':12} {terms(ranked.prediction)}"


def scaling(bests: Sequence[tuple[Job, Ranked]], purchase: Purchase = NO_PURCHASE) -> Iterator[str]:
    """Yield a heading, then a line per number of GPUs. Scaling: tokens/s per GPU over the smallest number's."""
    ascending = sorted(bests, key=lambda best: best[0].gpus)
    smallest, its_best = ascending[0]
    base_rate = layout_figures(smallest, its_best)["tokens_per_second"] / smallest.gpus
    yield f"{'GPUs':>6} {'step s':>8} {'MFU':>6} {'tokens/s':>11} {'scaling':>8}{_budget_heading(purchase)}  layout"
    for job, ranked in ascending:
        row = layout_figures(job, ranked, purchase)
        yield (
            f"{job.gpus:6} {row['step_seconds']:8.4g} {row['mfu']:6.1%} {row['tokens_per_second']:11,.0f} "
            f"{row['tokens_per_second'] / job.gpus / base_rate:8.1%}{_budget(row)}  {ranked.layout.text()}"
        )


def terms(prediction: Prediction) -> str:
    """Return the terms of a step in seconds, the largest first; those under a thousandth of the step are omitted."""
    largest_first = sorted(prediction.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in largest_first if seconds > prediction.step / 1000)


def why(job: Job, winner: Ranked) -> list[str]:
    """Return a sentence on where the winner's time goes, and up to three on layouts that differ in one setting.

    Of each setting (a degree, recomputation, the micro batch) the best layout with another value is compared: what it
    costs, and which term or how many missing bytes are the reason.
    """
    prediction = winner.prediction
    (name, seconds), *smaller = sorted(prediction.terms.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{name} {seconds / prediction.step:.0%}" for name, seconds in smaller[:4])
    sentences = [f"{name.capitalize()} takes {seconds / prediction.step:.0%} of a step, {rest}."]
    compared = []
    for layouts in one_change(job, winner.layout):
        bounded = [(predict(job.case(layout), at_least), layout) for layout in layouts]
        if bounded:
            _, layout = min(bounded, key=lambda pair: (not pair[0].fits, pair[0].step))
            compared.append((predict(job.case(layout)), layout))
    compared.sort(key=lambda pair: pair[0].step)
    fitting = [pair for pair in compared if pair[0].fits]
    too_large = [pair for pair in compared if not pair[0].fits]
    for changed_prediction, layout in [*fitting[:2], *too_large[:1]]:
        sentences.append(_compare(job, winner, layout, changed_prediction))
    return sentences


def one_change(job: Job, layout: Layout) -> Iterator[list[Layout]]:
    """Yield a list of layouts for each change of one setting; what has to follow the change varies within the list."""
    degrees = {"pp": layout.pp, "data": layout.data_ranks, "cp": layout.cp, "tp": layout.tp}
    for grown, shrunk in permutations(DEGREES, 2):  # twice as much of one, half of another
        if degrees[shrunk] % 2 == 0:
            changed = {**degrees, grown: degrees[grown] * 2, shrunk: degrees[shrunk] // 2}
            yield _on_mesh(job, layout, DegreeMesh(**changed))
    for mode in MODES:
        if mode != layout.recompute:
            yield _accepted(job, [layout._replace(recompute=mode)])
    for size in (layout.micro_batch_size * 2, layout.micro_batch_size // 2):
        if size > 0:
            yield _accepted(job, [layout._replace(micro_batch_size=size)])


def _accepted(job: Job, layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts that the config accepts."""
    return [layout for layout in layouts if job.accepts(layout)]


def _on_mesh(job: Job, layout: Layout, mesh: DegreeMesh) -> list[Layout]:
    """Return the layout on another mesh, with every sharding, and every schedule if its own is not possible there."""
    if mesh not in job.meshes or job.refusal(mesh):
        return []
    schedules = job.schedules(mesh, layout.micro_batch_size)
    if (layout.schedule, layout.virtual_stages) in schedules:
        schedules = [(layout.schedule, layout.virtual_stages)]
    moved = layout._replace(pp=mesh.pp, cp=mesh.cp, tp=mesh.tp, sequence_parallel=job.sequence_parallel(mesh)[-1])
    layouts = []
    for name, stages in schedules:
        scheduled = moved._replace(schedule=name, virtual_stages=stages)
        for sharding in job.shardings(mesh):
            layouts.append(scheduled._replace(**sharding._asdict()))
    return _accepted(job, layouts)


COMPARED_KEYS = ("tp", "pp", "cp", "recompute", "micro_batch_size", "data_ranks", "zero_stage")


def _compare(job: Job, winner: Ranked, layout: Layout, prediction: Prediction) -> str:
    """Return a sentence on what another layout costs beside the winner."""
    best = winner.prediction
    changed = []
    for key in COMPARED_KEYS:
        value, best_value = getattr(layout, key), getattr(winner.layout, key)
        if value != best_value:
            changed.append(f"{key.replace('_', ' ')} {value} instead of {best_value}")
    slower = prediction.step / best.step - 1
    if abs(slower) < 0.0005:
        time = "takes the same time"
    elif slower > 0:
        time = f"takes {slower:.1%} longer"
    else:
        time = f"is {-slower:.1%} faster"
    sentence = f"With {' and '.join(changed)}, a step {time}"
    if not prediction.fits:
        over = (prediction.memory.total - job.hardware.memory) / GIB
        return f"{sentence}, but needs {over:.1f} GiB more than a GPU has."
    differences = {}
    for name in {**best.terms, **prediction.terms}:
        differences[name] = prediction.terms.get(name, 0.0) - best.terms.get(name, 0.0)
    largest = max(differences, key=lambda name: differences[name])
    smallest = min(differences, key=lambda name: differences[name])
    reasons = []
    if differences[largest] > best.step / 1000:
        reasons.append(f"{differences[largest]:.3g} s more of {largest}")
    if differences[smallest] < -best.step / 1000:
        reasons.append(f"{-differences[smallest]:.3g} s less of {smallest}")
    return f"{sentence}: {', '.join(reasons)}." if reasons else f"{sentence}."


def rejections(found: Found) -> Iterator[str]:
    """Yield how many layouts, and how many whole meshes, were rejected for each reason."""
    for reason, count in found.rejected.most_common():
        yield f"{count:12,} {'layout' if count == 1 else 'layouts'}: {reason}"
    for reason, count in found.refused.most_common():
        yield f"{count:12,} {'mesh' if count == 1 else 'meshes'}: {reason}"


def misses(job: Job, found: Found) -> Iterator[str]:
    """Yield a line for each layout that would have won but does not fit, with what it lacks."""
    for miss in found.misses:
        memory = miss.prediction.memory._asdict()
        del memory["allocator"], memory["reserve"]  # no layout has a say in them
        largest = max(memory, key=lambda name: memory[name])
        faster = 1 - miss.prediction.step / found.best[0].prediction.step
        yield (
            f"{miss.layout.text()}: {faster:.1%} faster, but needs {miss.over / GIB:.1f} GiB more than the "
            f"{job.hardware.memory / GIB:.1f} GiB of a GPU (largest part: {largest} {memory[largest] / GIB:.1f} GiB)"
        )


def fits_nowhere(job: Job, found: Found) -> str:
    """Return why no layout fits, and which number of GPUs or sequence length would."""
    message = f"no layout fits in the {job.hardware.memory / GIB:.1f} GiB of one {job.hardware.gpu}"
    if found.least is not None:
        message += f"; the closest, {found.least.layout.text()}, needs {found.least.over / GIB:.1f} GiB more"
    remedies = []
    for factor in FURTHER:
        larger = replace(job, gpus=factor * job.gpus)
        if larger.gpus <= job.hardware.links[-1].gpus and search(larger, 1).best:
            remedies.append(f"on {larger.gpus} GPUs")
            break
    for factor in FURTHER:
        length = job.training.sequence_length // factor
        if length and search(replace(job, training=replace(job.training, sequence_length=length)), 1).best:
            remedies.append(f"with sequences of {length} tokens")
            break
    if remedies:
        return f"{message}; it would fit {' or '.join(remedies)}"
    return f"{message}; neither {FURTHER[-1]} times the GPUs nor 1/{FURTHER[-1]} of the sequence length is enough"


def divides_nowhere(job: Job, found: Found) -> str:
    """Return why there is no layout at all, and the next smaller number of GPUs that has one."""
    reasons = "; ".join(reason for reason, _ in found.refused.most_common(3))
    fewer = (gpus for gpus in range(job.gpus - 1, 0, -1) if _has_layout(replace(job, gpus=gpus)))
    fits = next(fewer, 1)
    return f"no valid layout on {job.gpus} GPUs: {reasons}; {fits} {'GPU' if fits == 1 else 'GPUs'} would work"


def _has_layout(job: Job) -> bool:
    return any(not job.refusal(mesh) for mesh in job.meshes)
