"""The limit of open files."""

import resource
import subprocess
import sys

from tests.tiny_run import ROOT
from torchllm.tools.launch.descriptors import describe_low_limit

PROGRAM = """
import resource, subprocess, sys
from torchllm.tools.launch.descriptors import raise_descriptor_limit

_, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
resource.setrlimit(resource.RLIMIT_NOFILE, (min(64, hard), hard))
assert raise_descriptor_limit() == hard
print(hard, flush=True)
subprocess.run(["/bin/sh", "-c", "ulimit -n"], check=True)
"""


def test_a_process_and_those_that_it_starts_get_what_the_system_allows() -> None:
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, capture_output=True, text=True, check=True)
    allowed, limit_of_child = done.stdout.split()
    assert allowed == limit_of_child


def test_a_limit_too_low_for_the_store_of_a_large_job_is_named() -> None:
    assert describe_low_limit(640, world_size=64) is None
    assert describe_low_limit(resource.RLIM_INFINITY, world_size=10**6) is None
    assert describe_low_limit(4096, world_size=16384) == (
        "a process on this node may open 4096 files, but a job of 16384 ranks needs 33280 on the node of rank 0: raise "
        "its hard limit (ulimit -Hn, or LimitNOFILE of the service that starts jobs)"
    )
