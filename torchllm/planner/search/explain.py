"""What a search found, in words: the table, why its first layout is first, what to change where nothing fits.

No torch. Every sentence is made of predictions: the winner's, and those of layouts that differ from it in one thing.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torchllm.planner.predict import Prediction, predict
from torchllm.planner.search.bounds import at_least
from torchllm.planner.search.layouts import MODES, DegreeMesh, Job, Layout
from torchllm.planner.search.search import Found, Ranked, search
from torchllm.planner.search.validity import judge

GIB = 2**30
FURTHER = (2, 4, 8, 16, 32)
"""times as many GPUs, or shares of the sequence, at which it is tried whether something fits"""
KINDS = {"tp": "tensor", "pp": "pipeline", "cp": "context"}


def layout_figures(job: Job, one: Ranked, tokens: float = 0.0) -> dict[str, Any]:
    """Of one layout: seconds, bytes, shares of 1. `tokens`: of the whole training, 0: not known."""
    of = one.prediction
    per_step = job.training.global_batch_size * job.training.sequence_length
    found: dict[str, Any] = {
        "gpus": job.gpus,
        "layout": one.layout._asdict(),
        "step_seconds": of.step,
        "mfu": of.mfu,
        "hfu": of.hfu,
        "memory_gib": of.memory.total / GIB,
        "fits": judge(job.case(one.layout), of).fits,
        "tokens_per_second": per_step / of.step,
        "petaflops": of.mfu * job.gpus * job.hardware.peak.bfloat16 / 1e15,
        "terms": of.terms,
        "memory": {name: held / GIB for name, held in of.memory._asdict().items()},
    }
    if tokens:
        seconds = tokens / per_step * of.step
        found |= {"days": seconds / 86400, "gpu_hours": seconds / 3600 * job.gpus}
    return found


def ranking_table(job: Job, best: Sequence[Ranked], tokens: float = 0.0) -> Iterator[str]:
    """Two lines a layout: what it is and costs; where the time goes, the largest first."""
    budget = "   days   GPU-hours" if tokens else ""
    shares = f"{'MFU':>6} {'HFU':>6}"
    yield f"{'':3} {'step s':>8} {shares} {'GiB':>6} {'':7} {'tokens/s':>10} {'PFLOP/s':>8}{budget}  layout"
    for place, one in enumerate(best, start=1):
        of = layout_figures(job, one, tokens)
        cost = f" {of['days']:6.1f} {of['gpu_hours']:11,.0f}" if tokens else ""
        yield (
            f"{place:2}. {of['step_seconds']:8.4g} {of['mfu']:6.1%} {of['hfu']:6.1%} {of['memory_gib']:6.1f} "
            f"{of['fits']:7} {of['tokens_per_second']:10,.0f} {of['petaflops']:8.4g}{cost}  {one.layout.text()}"
        )
        yield f"{'':12} {terms(one.prediction)}"


def scaling(best: Sequence[tuple[Job, Ranked]], tokens: float = 0.0) -> Iterator[str]:
    """A line for each number of GPUs, and how near it is to the first one's tokens a GPU and second."""
    first = min(best, key=lambda one: one[0].gpus)
    alone = layout_figures(*first)["tokens_per_second"] / first[0].gpus
    budget = "   days   GPU-hours" if tokens else ""
    yield f"{'GPUs':>6} {'step s':>8} {'MFU':>6} {'tokens/s':>11} {'scaling':>8}{budget}  layout"
    for job, one in sorted(best, key=lambda each: each[0].gpus):
        of = layout_figures(job, one, tokens)
        cost = f" {of['days']:6.1f} {of['gpu_hours']:11,.0f}" if tokens else ""
        yield (
            f"{job.gpus:6} {of['step_seconds']:8.4g} {of['mfu']:6.1%} {of['tokens_per_second']:11,.0f} "
            f"{of['tokens_per_second'] / job.gpus / alone:8.1%}{cost}  {one.layout.text()}"
        )


def terms(of: Prediction) -> str:
    """Where the time goes: seconds by term, the largest first, what is under a thousandth left out."""
    largest = sorted(of.terms.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {seconds:.3g} s" for name, seconds in largest if seconds > of.step / 1000)


def why(job: Job, winner: Ranked) -> list[str]:
    """A sentence on where the winner's time goes, and some on the best layout with another degree, recomputation, micro
    batch: what it would cost, and which term or how many bytes are to blame."""
    of = winner.prediction
    first, *less = sorted(of.terms.items(), key=lambda item: -item[1])
    rest = ", ".join(f"{name} {seconds / of.step:.0%}" for name, seconds in less[:4])
    said = [f"{first[0].capitalize()} takes {first[1] / of.step:.0%} of a step, {rest}."]
    compared = []
    for changed in _changes(job, winner.layout):
        near = [(predict(job.case(layout), at_least), layout) for layout in changed]
        if near:
            _, layout = min(near, key=lambda one: (not one[0].fits, one[0].step))
            compared.append((predict(job.case(layout)), layout))
    compared.sort(key=lambda one: one[0].step)
    fitting, others = ([one for one in compared if one[0].fits == fits] for fits in (True, False))
    return said + [_compared(job, winner, layout, other) for other, layout in [*fitting[:2], *others[:1]]]


def _changes(job: Job, layout: Layout) -> Iterator[list[Layout]]:
    """Layouts that differ in one thing, and in what has to follow: a list for each thing."""
    degrees = {"pp": layout.pp, "data": layout.data_ranks, "cp": layout.cp, "tp": layout.tp}
    for more in ("tp", "pp", "cp"):
        for less in degrees:
            for up, down in ((more, less), (less, more)):
                if up != down and degrees[down] % 2 == 0 and more == max(more, less, key=list(degrees).index):
                    mesh = DegreeMesh(**{**degrees, up: 2 * degrees[up], down: degrees[down] // 2})
                    yield _on(job, layout, mesh)
    yield [found for mode in MODES if mode != layout.recompute if job.accepts(found := layout._replace(recompute=mode))]
    for size in (2 * layout.micro_batch_size, layout.micro_batch_size // 2):
        found = layout._replace(micro_batch_size=size)
        yield [found] if size and job.accepts(found) else []


def _on(job: Job, layout: Layout, mesh: DegreeMesh) -> list[Layout]:
    """The layout on another mesh, its schedule, sharding and sequence parallelism anew."""
    if mesh not in job.meshes or job.refusal(mesh):
        return []
    schedules = job.schedules(mesh, layout.micro_batch_size)
    keep = [one for one in schedules if one == (layout.schedule, layout.virtual_stages)] or schedules
    base = layout._replace(pp=mesh.pp, cp=mesh.cp, tp=mesh.tp, sequence_parallel=job.sequence_parallel(mesh)[-1])
    found = [
        base._replace(schedule=name, virtual_stages=stages, dp_replicate=replicate, dp_shard=shard, zero_stage=zero)
        for name, stages in keep
        for replicate, shard, zero in job.shardings(mesh)
    ]
    return [one for one in found if job.accepts(one)]


def _compared(job: Job, winner: Ranked, layout: Layout, other: Prediction) -> str:
    of = winner.prediction
    named = ("tp", "pp", "cp", "recompute", "micro_batch_size", "data_ranks", "zero_stage")
    changed = [
        f"{key.replace('_', ' ')} {getattr(layout, key)} instead of {getattr(winner.layout, key)}"
        for key in named
        if getattr(layout, key) != getattr(winner.layout, key)
    ]
    slower = other.step / of.step - 1
    time = f"takes {slower:.1%} longer" if slower >= 0 else f"would be {-slower:.1%} faster"
    if not other.fits:
        over = (other.memory.total - job.hardware.memory) / GIB
        return f"With {', '.join(changed)} a step {time}, and {over:.1f} GiB of memory are missing."
    more = {name: other.terms.get(name, 0.0) - of.terms.get(name, 0.0) for name in {**of.terms, **other.terms}}
    worst, best = max(more, key=lambda name: more[name]), min(more, key=lambda name: more[name])
    saved = f", and {-more[best]:.3g} s less of {best}" if more[best] < -of.step / 1000 else ""
    return f"With {', '.join(changed)} a step {time}: {more[worst]:.3g} s more of {worst}{saved}."


def rejections(found: Found) -> Iterator[str]:
    """What became of all the others, by reason."""
    for reason, count in found.rejected.most_common():
        yield f"{count:12,} layouts: {reason}"
    for reason, count in found.refused.most_common():
        yield f"{count:12,} meshes: {reason}"


def misses(job: Job, found: Found) -> Iterator[str]:
    """Layouts that would have won, and what they lack."""
    for miss in found.misses:
        faster = 1 - miss.prediction.step / found.best[0].prediction.step
        largest = max(list(miss.prediction.memory._asdict().items())[:-2], key=lambda item: item[1])
        yield (
            f"{miss.layout.text()}: {faster:.1%} faster, but {miss.over / GIB:.1f} GiB over the "
            f"{job.hardware.memory / GIB:.1f} GiB of a GPU ({largest[0]} {largest[1] / GIB:.1f} GiB)"
        )


def fits_nowhere(job: Job, found: Found) -> str:
    """What is wrong where no layout fits, and what would do."""
    least = found.least
    said = f"no layout fits into the {job.hardware.memory / GIB:.1f} GiB of a {job.hardware.gpu}"
    if least is not None:
        said += f"; closest is {least.layout.text()}, {least.over / GIB:.1f} GiB over"
    remedies = []
    for times in FURTHER:
        larger = replace(job, gpus=times * job.gpus)
        if larger.gpus <= job.hardware.links[-1].gpus and search(larger, 1).best:
            remedies.append(f"{larger.gpus} GPUs")
            break
    for share in FURTHER:
        length = job.training.sequence_length // share
        if length and search(replace(job, training=replace(job.training, sequence_length=length)), 1).best:
            remedies.append(f"sequences of {length} tokens")
            break
    if not remedies:
        return said + f"; nor do {FURTHER[-1]} times as many GPUs or as short sequences: take GPUs with more memory"
    return said + f"; it would with {' or '.join(remedies)}"


def divides_nowhere(job: Job, found: Found) -> str:
    """Why there is no layout at all, and the next smaller number of GPUs that has one."""
    reasons = "; ".join(reason for reason, _ in found.refused.most_common(3))
    fewer = (gpus for gpus in range(job.gpus - 1, 0, -1) if _has_some(replace(job, gpus=gpus)))
    return f"{job.gpus} GPUs: no layout divides the model and the batch ({reasons}); {next(fewer, 1)} do"


def _has_some(job: Job) -> bool:
    return any(not job.refusal(mesh) for mesh in job.meshes)
