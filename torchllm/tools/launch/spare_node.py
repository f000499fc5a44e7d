"""Let a spare node wait for its job.

    python -P -m torchllm.tools.launch.spare_node RUN_FOLDER REQUEST_FILE START_TIMEOUT

A job that got more nodes than its batch can be shared by trains on the first ones, and run_train.sh starts this on the
others. They wait for the end of the job and end alike, so that a scheduler sees one job and starts all nodes again
together. All that a spare node knows of the others is the lease in the run folder (lease.py), which the job's owner
gives back at the end: with DONE after a success.

A spare node that alone is asked to end, because its pod is evicted, say, ends, and the job goes on without it.
No torch.
"""

import sys
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from torchllm.runtime.stop import STOP, STOPPED
from torchllm.tools.launch.lease import DONE, Owner, Timing, has_ended, newest_owner
from torchllm.tools.launch.process_tree import end_with_parent
from torchllm.tools.launch.start_lines import say_line

COMPLETE, FAILED, ASKED = 0, 1, 3
"""exit status: the job is done; it has failed or never begun; it was asked to stop, or this node alone was"""
REQUEST_PATIENCE = 10.0
"""seconds in which other nodes, if they are asked to stop as well, have created the file `STOP`"""


def wait_for_job(run_folder: Path, request: Path, start_timeout: float, timing: Timing | None = None) -> int:
    """Wait for the end of the job that trains in a run folder; return the exit status.

    request: a file that exists when this node was asked to end. start_timeout: seconds in which the job must begin, as
    long as its launchers wait for each other. The first owner that is found may be this job's, or an
    earlier one's: unless that is known to have ended, this job's first node needs time to take the folder from it.
    """
    timing = timing or Timing()
    first = owner = newest_owner(run_folder)
    began = first is not None and not has_ended(first)
    limit = 2 * timing.limit if began else start_timeout
    unchanged = 0.0
    requested = 0.0
    looked = timing.clock()
    while unchanged < limit:
        timing.sleep(timing.look)
        moment = timing.clock()
        elapsed = min(moment - looked, 2 * timing.look)  # this node may have been suspended with all others
        looked = moment
        unchanged += elapsed
        with suppress(OSError):  # a file system that does not answer now
            latest = newest_owner(run_folder)
            if latest != owner:
                owner, began, limit, unchanged = latest, True, timing.limit, 0.0
        if began and has_ended(owner):
            if (run_folder / STOPPED).exists():
                return ASKED
            return COMPLETE if _is_done(owner) else FAILED
        if request.exists():
            requested += elapsed
            is_alone = not (run_folder / STOP).exists()
            if requested > REQUEST_PATIENCE and (is_alone or not began):
                reason = "the job goes on without it" if is_alone else "no job has begun"
                say_line(f"spare node: this node was asked to end; {reason}")
                return ASKED
    if began:
        say_line(f"spare node: the job has given no sign of life for {limit:g} s: {owner}")
        return FAILED
    if _is_done(first) and not (run_folder / STOPPED).exists():
        return COMPLETE  # before this node was started
    say_line(f"spare node: no job has begun in {run_folder} for {limit:g} s")
    return FAILED


def _is_done(owner: Owner | None) -> bool:
    return owner is not None and owner.count == DONE


def main(arguments: Sequence[str]) -> int:
    """Wait as the command line says; return the exit status."""
    end_with_parent()
    run_folder, request, start_timeout = arguments
    return wait_for_job(Path(run_folder), Path(request), float(start_timeout))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
