"""The reference recipe, but rank 1 stops after some seconds, as a process does whose machine has died under it.

`benchmark first_hour` starts it to see whether the job ends, and names that rank.
"""

import os
import signal
import sys
import threading
from pathlib import Path

sys.path[0] = str(Path(__file__).parents[1])  # Python put this folder there; pretrain.py is in the one above

from torchllm.tools.front.start import load_configs

if __name__ == "__main__":
    CONFIGS = load_configs(sys.argv[1:])

import pretrain

SECONDS = 30.0
"""until rank 1 stops: long enough for the first steps"""

if __name__ == "__main__":
    if os.environ["RANK"] == "1":
        timer = threading.Timer(SECONDS, os.kill, (os.getpid(), signal.SIGSTOP))
        timer.daemon = True
        timer.start()
    pretrain.main(*CONFIGS)
