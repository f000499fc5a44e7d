"""torchrun for run_train.sh: `python -m torchllm.runtime.launch TORCHRUN_ARGUMENTS`.

Two differences. It handles USR2 alone, as "end at once": given TERM, torchrun leaves the ranks 30 s, too short for
some saves, so run_train.sh asks for a stop through a file instead. And it prints no traceback of its own when a rank
ends the job: a rank that failed has said why; one that was killed could not, and is named here.
"""

import logging
import signal
import sys

from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main


def launch(arguments: list[str]) -> None:
    """Run torchrun; SystemExit with 1 when a rank failed, 128 + the signal's number when one ended everything."""
    logging.getLogger("torch.distributed.elastic.multiprocessing.api").disabled = True
    try:
        main(["--signals-to-handle=SIGUSR2", *arguments])
    except SignalException as ended:
        sys.exit(128 + ended.sigval)
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        status = failure.exitcode
        if status != 1:
            how = f"was killed: {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
            print(f"rank {rank} {how}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    launch(sys.argv[1:])
