"""Copies of a run's checkpoints in object storage (`checkpoint.remote`), made in the background.

    URL/step-00000100/...          the files of the step folder; its manifest is last, so a copy is whole or none
    URL/step-00000100/shares/...   a name for each rank that has copied its share, until the manifest is there
    URL/owner/000001               who copies to this URL: see `remote_owner.py`

All ranks copy, each its share of the files, and exchange no message: rank 0 looks until the names of all ranks are
there, and then writes the manifest. The names have the manifest's hash, since files of an earlier attempt may be there:
a step that was saved again has other files of the same sizes. A failed copy is tried again; training goes on, and the
failure is logged. While a folder is copied it stays, and of the checkpoints that follow meanwhile none is copied: the
next one after it is, and the newest when the run ends.

A run whose folder lacks the newest step copies it back, each rank its
share; it is verified as it is loaded, like any checkpoint.
"""

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from functools import partial
from itertools import islice
from pathlib import Path
from queue import Queue

from torchllm.checkpoint import manifest as manifests
from torchllm.checkpoint.agreement import Group, any_rank, log_on_first, on_all, on_first, rank_of, size_of
from torchllm.checkpoint.history import Copies, folders_to_delete
from torchllm.checkpoint.manifest import MANIFEST, PROVEN, SUSPECT, CheckpointError, DamagedCheckpoint, Manifest
from torchllm.checkpoint.remote_owner import TIMING, NotOwner, OwnerTiming, RemoteOwner, refuse_followed
from torchllm.runtime.heartbeat import beat
from torchllm.runtime.storage import RemoteFolder, StorageError

logger = logging.getLogger(__name__)

MARKS = (PROVEN, SUSPECT)
MOST = 3
"""copies that a start looks at, from the newest on: a request or two each"""
SHARES = "shares"
"""folder in a copy: the ranks that have copied their share"""
LOOK = 5.0
"""seconds between two looks of the main thread at the copying of all ranks"""


class Incomplete(Exception):
    """Not all ranks have copied their share."""


class Superseded(Exception):
    """The run ends, and there is a newer checkpoint to copy."""


def growing_waits(first: float = 1.0, longest: float = 60.0) -> Iterator[float]:
    """Yield the seconds between two attempts, forever."""
    while True:
        yield first
        first = min(2 * first, longest)


class RemoteCopies(Copies):
    """See `Copies`. The background thread of a rank copies one step folder after the other."""

    def __init__(
        self,
        url: str,
        root: Path,
        group: Group,
        keep: int,
        keep_every: int,
        waits: Callable[[], Iterator[float]] = growing_waits,
        timing: OwnerTiming = TIMING,
    ) -> None:
        """Copy the step folders in `root` to the URL. keep, keep_every: keys of [checkpoint], for the copies too.

        Raises CheckpointError on all ranks if the storage cannot be reached, or another run copies to this URL.
        """
        self._storage = RemoteFolder(url)
        self._root = root
        self._group = group
        self._keep, self._keep_every = keep, keep_every
        self._waits = waits
        self._owner: RemoteOwner | None = None
        """on rank 0"""

        def take() -> int:
            self._owner = RemoteOwner(self._storage, root, timing)
            return self._owner.number

        self._refuse_followed = partial(refuse_followed, self._storage, on_first(group, take))
        self._closing = threading.Event()
        self._files = 0
        """files that this rank has copied, in either direction"""
        self._fetched: set[Path] = set()
        """step folders that were copied here"""
        self._marked: set[Path] = set()
        """marks that have been copied"""
        self._copying: Path | None = None
        """the step folder that was copied last, or is"""
        self._left_out: Path | None = None
        """the newest step folder, if it is not copied since another one is"""
        self._jobs: Queue[Callable[[], None] | None] = Queue()
        # A daemon: a run that ends by an error does not wait for the storage.
        self._thread = threading.Thread(target=self._work, name="checkpoint-copies", daemon=True)
        self._thread.start()

    def _work(self) -> None:
        while job := self._jobs.get():
            try:
                job()
            except Exception:  # a bug: without this thread all later checkpoints would stay uncopied in silence
                logger.exception("an error in copying checkpoints; training goes on")
            self._jobs.task_done()

    # Reads of a resumed run

    def folders(self, local: Sequence[Path]) -> list[Path]:
        def merged() -> list[Path]:
            copies = [self._root / step for step in islice(filter(self._is_good, self._steps()), MOST)]
            if elsewhere := [folder.name for folder in copies if folder not in local]:
                logger.info("%s has %s, which the run folder lacks", self._storage.url, ", ".join(elsewhere))
            return manifests.newest_first({*local, *copies})

        return on_first(self._group, merged)

    def _steps(self) -> list[Path]:
        """Return the names of the copies, newest first."""
        return manifests.newest_first(map(Path, self._storage.folders()))

    def _is_good(self, step: Path) -> bool:
        """Return whether a copy is whole and not suspect."""
        return self._storage.exists(f"{step}/{MANIFEST}") and not self._storage.exists(f"{step}/{SUSPECT}")

    def fetch(self, folder: Path) -> None:
        if folder.parent != self._root or on_first(self._group, folder.exists):
            return

        manifest = on_first(self._group, partial(self._manifest_of, folder))
        needed = sum(record.size for record in manifest.files.values())
        log_on_first(self._group, f"copying {folder.name} from {self._storage.url}: {needed / 2**30:.1f} GiB")
        temporary = on_first(self._group, partial(manifests.make_temporary, self._root, manifest.step, needed))
        assert temporary is not None  # the folder does not exist

        def copy() -> None:
            for name in self._share(sorted(manifest.files)):
                self._storage.download(f"{folder.name}/{name}", temporary / name)
                manifests.sync(temporary / name)
                self._files += 1

        def publish() -> None:
            if self._storage.exists(f"{folder.name}/{PROVEN}"):
                self._storage.download(f"{folder.name}/{PROVEN}", temporary / PROVEN)
            manifests.publish(temporary, folder, manifest)

        with ThreadPoolExecutor(1) as thread:
            copied = thread.submit(copy)
            self._wait_for_all_ranks(copied.done, lambda seconds: wait_for([copied], seconds))
        on_all(self._group, copied.result)
        on_first(self._group, publish)
        self._fetched.add(folder)

    def has(self, folder: Path) -> bool:
        is_from_here = folder.parent == self._root and folder not in self._fetched
        return is_from_here and on_first(self._group, partial(self._is_good, Path(folder.name)))

    def loaded(self, folder: Path) -> None:
        is_here = folder.parent == self._root and folder not in self._fetched
        if is_here and not on_first(self._group, partial(self._is_copied, folder)):
            self.add(folder)

    def _wait_for_all_ranks(self, is_done: Callable[[], bool], wait: Callable[[float], object]) -> None:
        """Wait until the copying of every rank is done. Sends a heartbeat for each file that a rank has copied.

        So a timeout is the time for a file, however many there are.
        """
        seen = self._files
        while any_rank(self._group, not is_done()):
            wait(LOOK)
            copied = self._files
            if any_rank(self._group, copied > seen):
                beat("copies")
            seen = copied

    def _manifest_of(self, folder: Path) -> Manifest:
        path = f"{folder.name}/{MANIFEST}"
        return manifests.parse_manifest(self._storage.read(path), f"{self._storage.url}/{path}")

    # Writes of a run

    def add(self, folder: Path) -> None:
        if (before := self.in_use()) is not None:
            self._left_out = folder
            slow = f"the copy of {before.name} takes longer than the time between checkpoints"
            log_on_first(self._group, f"{folder.name} is not copied: {slow}", logging.WARNING)
            return
        self._copying, self._left_out = folder, None
        self._jobs.put(partial(self._copy, folder))

    def in_use(self) -> Path | None:
        return self._copying if any_rank(self._group, self._jobs.unfinished_tasks > 0) else None

    def mark(self) -> None:
        for mark in self._new_marks():
            try:
                self._copy_mark(mark)
            except (StorageError, NotOwner) as error:
                logger.error("the mark %s is not copied: %s", mark, error)

    def close(self) -> None:
        self._closing.set()  # every rank still tries once
        if self._left_out is not None:
            self._jobs.put(partial(self._copy, self._left_out))
        self._jobs.put(None)
        self._wait_for_all_ranks(lambda: not self._thread.is_alive(), self._thread.join)
        if self._owner is not None:
            for folder in manifests.step_folders(self._root)[:1]:
                if not self._until_done(folder, partial(self._complete, folder)):
                    logger.error("the run ends, and %s is not copied to %s", folder.name, self._storage.url)
            self._copy_marks()
            self._until_done(self._root, self._owner.release)

    def _copy(self, folder: Path) -> None:
        """Copy this rank's share of a step folder; rank 0 also completes the copy."""
        try:
            names = sorted(manifests.read_manifest(folder).files)
        except CheckpointError:
            return  # deleted by now
        steps = [partial(self._copy_share, folder, list(self._share(names)))]
        if self._owner is not None:
            steps = [partial(self._make_way, folder), *steps, partial(self._complete, folder)]
        steps.insert(0, self._refuse_followed)  # or this rank would write over the files of a run that has followed
        if all(self._until_done(folder, step) for step in steps):
            self._copy_marks()

    def _copy_share(self, folder: Path, left: list[str]) -> None:
        """Copy this rank's share of a step folder, and tell rank 0. left: its files; a call after a failure goes on."""
        done = f"{folder.name}/{SHARES}/{self._share_names(folder)[rank_of(self._group)]}"
        if self._storage.exists(done):  # by a run that was killed before the copy was whole
            return
        while left:
            if self._closing.is_set() and self._left_out not in (None, folder):
                raise Superseded
            self._refuse_followed()  # each time: a job may be suspended for hours between two files
            self._storage.upload(folder / left[0], f"{folder.name}/{left[0]}")
            left.pop(0)
            self._files += 1
        self._storage.put(done, b"")

    def _share_names(self, folder: Path) -> list[str]:
        """Return the name of each rank's share: another one for other files, or if they are shared otherwise."""
        content = hashlib.sha256((folder / MANIFEST).read_bytes()).hexdigest()[:16]
        ranks = size_of(self._group)
        return [f"{content}-{rank}-of-{ranks}" for rank in range(ranks)]

    def _is_copied(self, folder: Path) -> bool:
        """Return whether there is a whole copy of this step folder, and not of one that it has replaced."""
        name = f"{folder.name}/{MANIFEST}"
        return self._storage.exists(name) and self._storage.read(name) == (folder / MANIFEST).read_bytes()

    def _make_way(self, folder: Path) -> None:
        """Take the manifest, first, and the marks from an older copy of a step that was saved again."""
        older = self._storage.sizes(folder.name)
        for name in (MANIFEST, *MARKS):
            if name in older:
                self._storage.delete(f"{folder.name}/{name}")
                self._marked.discard(folder / name)

    def _complete(self, folder: Path) -> None:
        """Write the manifest of a copy, and delete old copies. Raises Incomplete while other ranks are copying."""
        self._refuse_followed()
        if not self._is_copied(folder):
            if not self._storage.sizes(f"{folder.name}/{SHARES}").keys() >= set(self._share_names(folder)):
                raise Incomplete
            is_first = self._storage.put_if_absent(f"{folder.name}/{MANIFEST}", (folder / MANIFEST).read_bytes())
            if not is_first and not self._is_copied(folder):  # a client writes again where the answer was lost
                raise NotOwner(f"{self._storage.url}/{folder.name} has the manifest of another run")
            self._storage.delete_folder(f"{folder.name}/{SHARES}")
            logger.info("copied %s to %s", folder.name, self._storage.url)
        self._delete_old()

    def _delete_old(self) -> None:
        """Delete copies by the rules of the run folder; one whose folder is still here stays."""
        if not self._keep:
            return
        steps = self._steps()
        old = folders_to_delete(steps, self._keep, self._is_good)
        has_proven = any(self._storage.exists(f"{step}/{PROVEN}") for step in steps if step not in old)
        for step in old:
            for_good = self._keep_every and manifests.step_of(step) % self._keep_every == 0
            if for_good or (self._root / step).exists():
                continue
            if not has_proven and self._storage.exists(f"{step}/{PROVEN}"):
                has_proven = True  # the newest of them stays
                continue
            self._storage.delete(f"{step}/{MANIFEST}")  # first: without it the others count for nothing
            self._storage.delete_folder(step.name)

    def _copy_marks(self) -> None:
        if self._owner is None:
            return
        for mark in self._new_marks():
            self._until_done(mark.parent, partial(self._copy_mark, mark))

    def _new_marks(self) -> list[Path]:
        """Return the marks that this process has not copied."""
        marks = [folder / name for folder in manifests.step_folders(self._root) for name in MARKS]
        return [mark for mark in marks if mark not in self._marked and mark.exists()]

    def _copy_mark(self, mark: Path) -> None:
        self._refuse_followed()
        self._storage.upload(mark, f"{mark.parent.name}/{mark.name}")
        self._marked.add(mark)

    def _share(self, names: Sequence[str]) -> Sequence[str]:
        return names[rank_of(self._group) :: size_of(self._group)]

    def _until_done(self, folder: Path, action: Callable[[], None]) -> bool:
        """Try an action until it succeeds, or its folder has gone, or once when the run ends; return whether it did."""
        reported = ""
        for wait in self._waits():
            is_last = self._closing.is_set()
            try:
                action()
                return True
            except (FileNotFoundError, DamagedCheckpoint, Superseded):
                break  # the folder has been deleted, or is not the newest
            except NotOwner as error:
                logger.error("%s", error)
                break
            except Incomplete:
                pass
            except StorageError as error:
                if str(error) != reported:
                    reported = str(error)
                    logger.error("%s is not copied yet, training goes on: %s", folder.name, error)
            if is_last or not folder.exists():
                break
            self._closing.wait(wait)
        return False
