"""Intervals of a training loop: log, evaluate or save every n steps."""


def due(step: int, interval: int, steps: int) -> bool:
    """Return whether `step` is a multiple of `interval`, or the last of `steps`; interval 0: False."""
    return interval > 0 and (step % interval == 0 or step == steps)
