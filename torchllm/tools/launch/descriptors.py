"""The number of files and sockets that a process may have open at once (ulimit -n). No torch."""

import resource

FILES_OF_RANK = 512
"""descriptors that a rank needs besides the store's: sockets, shards of a corpus, checkpoint files, Python's own"""
CONNECTIONS_PER_RANK = 2
"""connections of each rank of the job to its store: of the process groups and of the hang watch"""


def raise_descriptor_limit() -> int:
    """Raise the limit of this process, and of processes it starts, as far as the system allows; return the limit.

    Many systems start a process with 1,024, although they allow a million.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard and hard != resource.RLIM_INFINITY:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard


def describe_low_limit(limit: int, world_size: int) -> str | None:
    """Return advice on a limit that is too low on the node of rank 0, which serves the store; None if it is not.

    The store's process has a connection to every rank; the number of a rank's descriptors does not depend on the job.
    """
    needed = FILES_OF_RANK + CONNECTIONS_PER_RANK * world_size
    if limit == resource.RLIM_INFINITY or limit >= needed:
        return None
    return (
        f"a process on this node may open {limit} files, but a job of {world_size} ranks needs {needed} on the node of "
        "rank 0: raise its hard limit (ulimit -Hn, or LimitNOFILE of the service that starts jobs)"
    )
