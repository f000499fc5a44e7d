"""Run torchrun for run_train.sh: `python -m torchllm.runtime.launch TORCHRUN_ARGUMENTS`.

There are three differences from plain torchrun. It raises the limit of open files, for its ranks and for the store that
it serves to all ranks of the job. It reacts to SIGUSR2 only, by ending all ranks at once: after SIGTERM
torchrun gives the ranks 30 s, too short for some saves, so run_train.sh asks for a stop through a file instead. And it
prints no traceback of its own when a rank ends the job: a rank that failed has printed its error; a rank that was
killed could not, and is named here.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main

from torchllm.runtime.descriptors import raise_descriptor_limit


def launch(arguments: list[str]) -> None:
    """Run torchrun with `arguments`. Raises SystemExit with 1 if a rank failed, 128 + N if signal N ended the job."""
    raise_descriptor_limit()
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True
    try:
        main(["--signals-to-handle=SIGUSR2", *arguments])
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status != 1:
            ending = f"was killed: {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            print(f"rank {rank} {ending}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    launch(sys.argv[1:])
