"""Environment variables that describe a job to its ranks; a launcher sets them."""

import os

LAUNCHED = "TORCHLLM_LAUNCHED"
"""environment variable: start time of run_train.sh, or of a later attempt of its job, in seconds since 1970"""
ATTEMPT = "TORCHLLM_ATTEMPT"
"""environment variable: number of the attempt, from 2, in ranks that a launcher restarted"""
RANK_NOTES = "TORCHLLM_RANK_NOTES"
"""environment variable: folder of the notes that ranks leave for their launcher; unset without one"""
LOST_PEER_NOTE = "lost-peer-"
"""start of the name of a note there: a rank, whose number follows, fails because another one is gone"""
HANDED = "TORCHLLM_CONFIG"
"""environment variable: file of the checked config, which run_train.sh has made and which --check fills"""
START_TIMEOUT = "TORCHLLM_START_TIMEOUT"
"""environment variable: run.start_timeout, for ranks that have not read their config yet"""


def is_restart() -> bool:
    """Return whether this process is a rank of a later attempt of the same job."""
    return ATTEMPT in os.environ
