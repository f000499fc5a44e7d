"""What a training loop does every so many steps."""


def due(step: int, interval: int, steps: int) -> bool:
    """Return whether something done every `interval` steps, and at the last of `steps`, is done at `step`; 0: never."""
    return interval > 0 and (step % interval == 0 or step == steps)
