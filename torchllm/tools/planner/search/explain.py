"""Explain a search in words: a table of its layouts, why the first is first, changes to try if nothing fits.

No torch. Every sentence states predictions: of the winner, and of layouts that differ from it in one setting.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

from torchllm.tools.planner.offload import USABLE
from torchllm.tools.planner.predict import Prediction, predict
from torchllm.tools.planner.search.bounds import at_least
from torchllm.tools.planner.search.dials import cheapest_dial
from torchllm.tools.planner.search.layouts import MODES, DegreeMesh, Job, Layout
from torchllm.tools.planner.search.search import HOST_MEMORY, Found, Ranked, mesh_of, search, sharded
from torchllm.tools.planner.validity import judge

GIB = 2**30
FURTHER = (2, 4, 8, 16, 32)
"""factors to try for more GPUs, or shorter sequences, until a layout fits"""
DEGREES = ("pp", "data", "cp", "tp")
"""fields of `DegreeMesh`"""
SMALL = 1 / 1000
"""share of a step below which a term is not worth a word"""
EXPERT_CHUNKS = 2
"""parallel.expert_chunks that `why` compares with 1: more of them hide little more, and have smaller products"""
NO_DIFFERENCE = 0.0005
"""share of a step below which two layouts take the same time"""


def layout_figures(job: Job, ranked: Ranked, tokens: float = 0.0) -> dict[str, Any]:
    """Return the figures of one layout: seconds, GiB, shares of 1. tokens: of the whole training; 0: unknown."""
    prediction = ranked.prediction
    verdict = judge(job.case(ranked.layout), prediction)
    tokens_per_step = job.training.global_batch_size * job.training.sequence_length
    memory_gib = {name: bytes / GIB for name, bytes in prediction.memory._asdict().items()}
    figures: dict[str, Any] = {
        "gpus": job.gpus,
        "layout": ranked.layout._asdict(),
        "step_seconds": prediction.step,
        "mfu": prediction.mfu,
        "hfu": prediction.hfu,
        "memory_gib": prediction.memory.total / GIB,
        "host_gib": prediction.on_host / GIB,
        "fits": verdict.fits,
        "out_of_memory": verdict.out_of_memory,
        "tokens_per_second": tokens_per_step / prediction.step,
        "petaflops": prediction.mfu * job.gpus * job.hardware.peak.bfloat16 / 1e15,
        "terms": prediction.terms,
        "memory": memory_gib,
    }
    if tokens:
        hours = tokens / figures["tokens_per_second"] / 3600
        figures |= {"days": hours / 24, "gpu_hours": hours * job.gpus}
    return figures


BUDGET = "   days   GPU-hours"
"""titles of the columns of `_budget`"""


def _budget(figures: dict[str, Any]) -> str:
    """Return the cost of the whole training; empty if its tokens are unknown."""
    return f" {figures['days']:6.1f} {figures['gpu_hours']:11,.0f}" if "days" in figures else ""


def ranking_table(job: Job, best: Sequence[Ranked], tokens: float = 0.0) -> Iterator[str]:
    """Yield a heading, then two lines per layout: its cost and settings; the terms of its step, the largest first."""
    yield f"      step s    MFU    HFU    GiB           tokens/s  PFLOP/s{BUDGET if tokens else ''}  layout"
    for number, ranked in enumerate(best, start=1):
        figures = layout_figures(job, ranked, tokens)
        cost = "{step_seconds:8.4g} {mfu:6.1%} {hfu:6.1%} {memory_gib:6.1f} {fits:7}".format_map(figures)
        rate = "{tokens_per_second:10,.0f} {petaflops:8.4g}".format_map(figures)
        yield f"{number:2}. {cost} {rate}{_budget(figures)}  {ranked.layout.text()}"
        yield " " * 13 + terms(ranked.prediction)


def scaling(bests: Sequence[tuple[Job, Ranked]], tokens: float = 0.0) -> Iterator[str]:
    """Yield a heading, then a line per number of GPUs. Scaling: tokens/s per GPU over the smallest number's."""
    yield f"  GPUs   step s    MFU    tokens/s  scaling{BUDGET if tokens else ''}  layout"
    rate_of_smallest = 0.0
    for job, ranked in sorted(bests, key=lambda best: best[0].gpus):
        figures = layout_figures(job, ranked, tokens)
        rate = figures["tokens_per_second"] / job.gpus
        rate_of_smallest = rate_of_smallest or rate
        columns = "{gpus:6} {step_seconds:8.4g} {mfu:6.1%} {tokens_per_second:11,.0f}".format_map(figures)
        yield f"{columns} {rate / rate_of_smallest:8.1%}{_budget(figures)}  {ranked.layout.text()}"


def terms(prediction: Prediction) -> str:
    """Return the terms of a step in seconds, the largest first; those under a thousandth of the step are omitted."""
    largest_first = sorted(prediction.terms.items(), key=lambda term: -term[1])
    smallest = SMALL * prediction.step
    words = [f"{name} {seconds:.3g} s" for name, seconds in largest_first if seconds > smallest]
    return ", ".join(words)


def why(job: Job, winner: Ranked) -> list[str]:
    """Return a sentence on where the winner's time goes, and up to three on layouts that differ in one setting.

    For each setting (a degree, recomputation, the micro batch) the best layout with another value is compared: its
    cost, and the term or the missing memory that explains it. With expert parallelism chunks of tokens are one more.
    """
    compared = []
    for layouts in one_change(job, winner.layout):
        if layouts:
            layout = _fastest(job, layouts)
            compared.append(Ranked(layout, predict(job.case(layout))))
    compared.sort(key=lambda ranked: ranked.prediction.step)
    fitting = [ranked for ranked in compared if ranked.prediction.fits]
    too_large = [ranked for ranked in compared if not ranked.prediction.fits]
    sentences = [_where_time_goes(winner.prediction)]
    for changed in [*fitting[:2], *too_large[:1]]:
        settings = " and ".join(_changed_settings(winner.layout, changed.layout))
        sentences.append(_compare(job, settings, changed.prediction, winner.prediction))
    if winner.layout.ep > 1 and job.of_all_layouts.get("expert_chunks", 1) == 1:
        chunked = replace(job, of_all_layouts={**job.of_all_layouts, "expert_chunks": EXPERT_CHUNKS})
        settings = f"parallel.expert_chunks {EXPERT_CHUNKS} instead of 1"
        sentences.append(_compare(job, settings, predict(chunked.case(winner.layout)), winner.prediction))
    return sentences


def _where_time_goes(prediction: Prediction) -> str:
    """Return a sentence with the five largest terms of a step."""
    largest_first = sorted(prediction.terms.items(), key=lambda term: -term[1])
    largest, *smaller = [(name, f"{seconds / prediction.step:.0%}") for name, seconds in largest_first[:5]]
    name, share = largest
    rest = ", ".join(f"{name} {share}" for name, share in smaller)
    return f"{name.capitalize()} takes {share} of a step, {rest}."


def _fastest(job: Job, layouts: Sequence[Layout]) -> Layout:
    """Return the layout with the least bound of its step time, of those that fit if any does."""
    bounds = {layout: predict(job.case(layout), at_least) for layout in layouts}
    fitting = [layout for layout in layouts if bounds[layout].fits]
    return min(fitting or layouts, key=lambda layout: bounds[layout].step)


def one_change(job: Job, layout: Layout) -> Iterator[list[Layout]]:
    """Yield a list of layouts for each change of one setting; settings that must follow vary within the list."""
    mesh = mesh_of(layout)
    degrees = mesh._asdict()
    for doubled, halved in permutations(DEGREES, 2):
        if degrees[halved] % 2 == 0:
            changes = {doubled: degrees[doubled] * 2, halved: degrees[halved] // 2}
            yield _on_mesh(job, layout, mesh._replace(**changes))
    for mode in MODES:
        if mode != layout.recompute:
            yield _accepted(job, [layout._replace(recompute=mode)])
    for key in ("micro_batch_size", "ep"):
        number = getattr(layout, key)
        yield _accepted(job, [layout._replace(**{key: number * 2})])
        if number > 1:
            yield _accepted(job, [layout._replace(**{key: number // 2})])


def _accepted(job: Job, layouts: Sequence[Layout]) -> list[Layout]:
    """Return the layouts that the config accepts."""
    return [layout for layout in layouts if job.accepts(layout)]


def _on_mesh(job: Job, layout: Layout, mesh: DegreeMesh) -> list[Layout]:
    """Return the layout on another mesh, with every sharding of weights.

    Every schedule and every degree of expert parallelism is taken if its own is not possible there.
    """
    is_possible = mesh in job.meshes and not job.refusal(mesh)
    if not is_possible:
        return []
    schedules = job.schedules(mesh, layout.micro_batch_size)
    schedule = layout.schedule, layout.virtual_stages
    if schedule in schedules:
        schedules = [schedule]
    sp = job.sequence_parallel(mesh)[-1]
    moved = layout._replace(pp=mesh.pp, cp=mesh.cp, tp=mesh.tp, sequence_parallel=sp)
    shardings = job.shardings(mesh)
    shardings = [sharding for sharding in shardings if sharding.ep == layout.ep] or shardings
    layouts = []
    for name, stages in schedules:
        scheduled = moved._replace(schedule=name, virtual_stages=stages)
        for sharding in shardings:
            layouts.append(sharded(scheduled, sharding))
    return _accepted(job, layouts)


COMPARED_KEYS = ("tp", "pp", "cp", "ep", "recompute", "micro_batch_size", "data_ranks", "zero_stage")


def _compare(job: Job, settings: str, prediction: Prediction, best: Prediction) -> str:
    """Return a sentence on the cost of other settings relative to the winner's, `best`."""
    sentence = f"With {settings}, a step {_time_beside(prediction.step, best.step)}"
    if not prediction.fits:
        return f"{sentence}, but {missing_memory(job, prediction)}."
    reasons = ", ".join(_reasons(prediction, best))
    return f"{sentence}: {reasons}." if reasons else f"{sentence}."


def missing_memory(job: Job, prediction: Prediction) -> str:
    """Return the memory that a layout lacks, of the GPU or of the host. It does not fit."""
    over = prediction.memory.total - job.hardware.memory
    if over > 0:
        return f"needs {_gib(over)} more than a GPU has"
    return f"needs {_gib(prediction.on_host)} on the host, more than {room_on_host(job)}"


def room_on_host(job: Job) -> str:
    """Return the bytes of the host's memory that a plan may take, in words."""
    return f"{USABLE:.0%} of the {_gib(job.hardware.host.capacity)} of host memory per GPU"


def _changed_settings(old: Layout, new: Layout) -> Iterator[str]:
    """Yield each setting that differs between two layouts."""
    for key in COMPARED_KEYS:
        old_value, new_value = getattr(old, key), getattr(new, key)
        if new_value != old_value:
            yield f"{key.replace('_', ' ')} {new_value} instead of {old_value}"


def _time_beside(step: float, best: float) -> str:
    """Return the duration of a step relative to the best one."""
    slower = step / best - 1
    if abs(slower) < NO_DIFFERENCE:
        return "takes the same time"
    return f"takes {slower:.1%} longer" if slower > 0 else f"is {-slower:.1%} faster"


def _reasons(prediction: Prediction, best: Prediction) -> Iterator[str]:
    """Yield the term with the largest increase over the other step, and the one with the largest decrease."""
    differences = {}
    for name in best.terms | prediction.terms:
        differences[name] = prediction.terms.get(name, 0.0) - best.terms.get(name, 0.0)
    smallest = SMALL * best.step
    grown = max(differences, key=lambda name: differences[name])
    if differences[grown] > smallest:
        yield f"{differences[grown]:.3g} s more of {grown}"
    shrunk = min(differences, key=lambda name: differences[name])
    if differences[shrunk] < -smallest:
        yield f"{-differences[shrunk]:.3g} s less of {shrunk}"


def rejections(outcome: Found) -> Iterator[str]:
    """Yield how many layouts, and how many whole meshes, were rejected for each reason."""
    for counts, singular, plural in ((outcome.rejected, "layout", "layouts"), (outcome.refused, "mesh", "meshes")):
        for reason, count in counts.most_common():
            yield f"{count:12,} {singular if count == 1 else plural}: {reason}"


def misses(job: Job, outcome: Found) -> Iterator[str]:
    """Yield a line for each layout that would have won but does not fit, with its missing memory."""
    capacity = _gib(job.hardware.memory)
    best = outcome.best[0].prediction.step
    for miss in outcome.misses:
        faster = 1 - miss.prediction.step / best
        over = f"{_gib(miss.over)} more than the {capacity} of a GPU"
        memory = miss.prediction.memory._asdict()
        del memory["allocator"], memory["reserve"]  # no layout has a say in them
        largest = max(memory, key=lambda name: memory[name])
        part = f"largest part: {largest} {_gib(memory[largest])}"
        yield f"{miss.layout.text()}: {faster:.1%} faster, but needs {over} ({part})"


def _gib(bytes: float) -> str:
    return f"{bytes / GIB:.1f} GiB"


def fits_nowhere(job: Job, outcome: Found) -> str:
    """Return why no layout fits, and which key, number of GPUs or sequence length would do."""
    message = f"no layout fits in the {_gib(job.hardware.memory)} of one {job.hardware.gpu}"
    miss = outcome.closest_miss
    if miss is not None:
        message += f"; the closest, {miss.layout.text()}, needs {_gib(miss.over)} more"
    if outcome.rejected[HOST_MEMORY]:
        message += f"; {outcome.rejected[HOST_MEMORY]} fit there, but not in {room_on_host(job)}"
    dial = cheapest_dial(job)
    if dial is not None:
        message += f"; with {dial.setting} it would, and a step {_time_beside(dial.slower, 1.0)}"
    remedies = []
    gpus = _enough_gpus(job)
    if gpus:
        remedies.append(f"on {gpus} GPUs")
    length = _short_enough_sequence(job)
    if length:
        remedies.append(f"with sequences of {length} tokens")
    if remedies:
        return f"{message}; it would fit {' or '.join(remedies)}"
    factor = FURTHER[-1]
    return f"{message}; neither {factor} times the GPUs nor 1/{factor} of the sequence length is enough"


def _enough_gpus(job: Job) -> int:
    """Return the next larger number of GPUs that a layout fits on; 0 if the cluster has too few."""
    for factor in FURTHER:
        larger = replace(job, gpus=factor * job.gpus)
        if larger.gpus > job.hardware.links[-1].gpus:
            return 0
        if search(larger, 1).best:
            return larger.gpus
    return 0


def _short_enough_sequence(job: Job) -> int:
    """Return the next smaller sequence length that a layout fits with; 0 if none does."""
    for factor in FURTHER:
        length = job.training.sequence_length // factor
        if length:
            training = replace(job.training, sequence_length=length)
            if search(replace(job, training=training), 1).best:
                return length
    return 0


def divides_nowhere(job: Job, outcome: Found) -> str:
    """Return why there is no layout at all, and the next smaller number of GPUs that has one."""
    reasons = "; ".join(reason for reason, _ in outcome.refused.most_common(3))
    reasons = reasons or "no mesh has the degrees that are set"
    gpus = job.gpus - 1
    while gpus > 1 and not _has_layout(replace(job, gpus=gpus)):
        gpus -= 1
    noun = "GPU" if gpus == 1 else "GPUs"
    return f"no valid layout on {job.gpus} GPUs: {reasons}; {gpus} {noun} would work"


def _has_layout(job: Job) -> bool:
    return any(not job.refusal(mesh) for mesh in job.meshes)
