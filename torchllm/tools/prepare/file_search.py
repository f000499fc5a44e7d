"""The files at a path of the config, each once, and their splits as told by their names.

Folders behind links are searched too, except for links back to a folder that is being searched. A file with several
names is taken by the one that no link is part of. Folders of torchllm's own output are left out, unless the path names
one.
"""

import glob
import os
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Literal, NamedTuple

from torchllm.config.errors import DataError
from torchllm.config.files import is_url
from torchllm.tools.prepare.file_kinds import kind_of_file

_RUN_PARTS = {
    *("checkpoints", "config.toml", "evaluations", "experts.jsonl", "goodput.json", "hang", "lease", "metrics.jsonl"),
    *("profile", "report.html", "stop", "stopped.json", "tensorboard", "trackers"),
}
"""files and folders in a run folder"""
_TAKEN = re.compile(r"\d{6}")
"""name of a file in the lease of a run"""
_OUTPUTS = {
    "a checkpoint": re.compile(r".*\.distcp"),
    "tokens": re.compile(r"shards\.bin|\d{5}\.(train|validation)\.bin"),
    "a cache": re.compile(r"[a-z]+-[0-9a-f]{16}(\.json)?|[0-9a-f]{16}-[0-9a-f]{8}|\S+--\S+@\S+"),
    "a model": re.compile(r".*\.safetensors"),
}
"""kind of output -> name of a file or folder in it"""

NamedSplit = Literal["train", "held out", "test"]

_SPLIT_WORDS: dict[str, NamedSplit] = {"test": "test"}
_SPLIT_WORDS |= dict.fromkeys(("val", "valid", "validation", "dev", "eval"), "held out")
_WORD = re.compile(rf"(?<![^\W\d_])({'|'.join(_SPLIT_WORDS)})(?![^\W\d_])", re.IGNORECASE)
"""a word between characters that are no letters: in val_0.bin and x/test/y, not in latest or contest"""


class FoundFile(NamedTuple):
    path: str
    split: NamedSplit
    """from the names below the path of the config"""


class FoundFiles(NamedTuple):
    """The files at a path of the config."""

    files: list[FoundFile]
    """sorted by path"""
    ignored: Mapping[str, int] = {}
    """number of files that were not taken, by their kind (see `kind_of_file`)"""
    folders: int = 0
    """folders that match a glob; they were not searched"""
    outputs: Mapping[str, str] = {}
    """folders and files of torchllm's own output, which were not searched -> their kind"""


def find_files(path: str, takes: Callable[[str], bool]) -> FoundFiles:
    """Return the files at a path: the file, those in the folder, or those that match the glob.

    takes: whether a file in a folder is taken, by its name. Files that a glob names are taken. Raises DataError if a
    folder cannot be read.
    """
    if is_url(path):
        return _find_objects(path, takes)
    outputs: dict[str, str] = {}
    # A path that exists is taken literally: its name may hold characters that mean something in a glob.
    if os.path.isdir(path):
        ignored: Counter[str] = Counter()
        inside: list[str] = []
        for file in _walk(path, outputs):
            name = os.path.basename(file)
            if not name.startswith(".") and takes(name):
                inside.append(file)
            else:
                ignored[kind_of_file(name)] += 1
        return FoundFiles(_by_name(_each_once(inside, path), path, ""), ignored, outputs=outputs)
    if os.path.lexists(path):
        return FoundFiles([FoundFile(path, "train")])
    base, pattern = _base_of(path)
    matches = _match(base, pattern, outputs)
    paths = [match for match in matches if not os.path.isdir(match)]
    files = _by_name(_each_once(paths, base), base, pattern)
    return FoundFiles(files, folders=len(matches) - len(paths), outputs=outputs)


def _base_of(path: str) -> tuple[str, str]:
    """Return the folder of a glob that has all matches, with a slash at its end, and the rest of it."""
    parts = path.split("/")
    first = next((place for place, part in enumerate(parts) if glob.has_magic(part)), len(parts) - 1)
    return "".join(f"{part}/" for part in parts[:first]), "/".join(parts[first:])


def _find_objects(url: str, takes: Callable[[str], bool]) -> FoundFiles:
    """Return the same as `find_files` of a URL. Raises DataError if its storage fails."""
    from torchllm.tools.prepare.remote_files import list_objects  # most sources are on this machine

    objects = sorted(list_objects(url))
    if objects == [url]:
        return FoundFiles([FoundFile(url, "train")])
    base, pattern = (f"{url.rstrip('/')}/", "") if objects else _base_of(url)
    if pattern and glob.has_magic(pattern):
        objects = sorted(list_objects(base))
    names = [_below(file, base) for file in objects]
    names_in: dict[str, list[str]] = {}
    for name in names:
        names_in.setdefault(os.path.dirname(name), []).append(os.path.basename(name))
    kinds = {folder: kind for folder, inside in names_in.items() if folder and (kind := _output_in(folder, inside))}
    ignored: Counter[str] = Counter()
    outputs: dict[str, str] = {}
    paths = []
    for name in names:
        parts = name.split("/")
        is_hidden = any(part.startswith(".") for part in parts)
        if pattern:
            is_read = _fits(parts, pattern.split("/")) and not (is_hidden and "**" in pattern)
        else:
            is_read = takes(parts[-1]) and not is_hidden
        above = ("/".join(parts[:depth]) for depth in range(1, len(parts)))
        output = next((folder for folder in above if folder in kinds), "")
        if output and (is_read or not pattern):
            outputs[f"{base}{output}"] = kinds[output]
        elif is_read:
            paths.append(f"{base}{name}")
        elif not pattern:
            ignored[kind_of_file(name)] += 1
    return FoundFiles(_by_name(paths, base, pattern), ignored, outputs=outputs)


def _by_name(paths: Sequence[str], base: str, pattern: str) -> list[FoundFile]:
    """Return the files with the splits that their names tell; words of the config's own pattern do not count."""
    written = _words(pattern)
    found = []
    for path in paths:
        said = {_SPLIT_WORDS[word] for word in _words(_below(path, base)) - written}
        split: NamedSplit = "test" if "test" in said else "held out" if said else "train"
        found.append(FoundFile(path, split))
    return found


def _words(text: str) -> set[str]:
    return {word.lower() for word in _WORD.findall(text)}


def _below(path: str, base: str) -> str:
    """Return the part of a path below the search folder."""
    return path[len(base) :].lstrip("/")


def _each_once(paths: Sequence[str], base: str) -> list[str]:
    """Return the paths sorted, one per file: one that has no link below `base`, or else the first."""
    real_base = os.path.realpath(base)
    real_folders: dict[str, str] = {}
    path_of: dict[str, str] = {}
    for path in sorted(paths):
        folder, name = os.path.split(path)
        if folder not in real_folders:
            real_folders[folder] = os.path.realpath(folder)
        file = os.path.realpath(path) if os.path.islink(path) else os.path.join(real_folders[folder], name)
        if file not in path_of or file == os.path.join(real_base, _below(path, base)):
            path_of[file] = path
    return sorted(path_of.values())


def _walk(root: str, outputs: dict[str, str]) -> Iterator[str]:
    """Yield the files below `root`, in each folder once, those behind links last; hidden folders are left out.

    outputs: gets the folders and files of torchllm's own output, which are left out, too. Raises DataError if
    one cannot be read.
    """
    real_root = os.path.realpath(root)
    seen: set[tuple[int, int]] = set()
    """device and inode of each folder"""
    waiting = [root]
    while waiting:
        linked: list[str] = []
        for start in waiting:
            for inside, folders, names in os.walk(start, onerror=_raise_unreadable):
                status = os.stat(inside)
                if (status.st_dev, status.st_ino) in seen:
                    folders.clear()
                    continue
                seen.add((status.st_dev, status.st_ino))
                names = _without_output(inside, root, folders, names, outputs)
                folders[:] = sorted(name for name in folders if not name.startswith("."))
                for name in folders:  # os.walk itself follows no link
                    path = os.path.join(inside, name)
                    if os.path.islink(path) and not _leads_back(path, inside, real_root):
                        linked.append(path)
                yield from (os.path.join(inside, name) for name in names)
        waiting = sorted(linked)


def _without_output(folder: str, root: str, folders: list[str], names: list[str], outputs: dict[str, str]) -> list[str]:
    """Return the files of a folder without torchllm's own output, and drop the folders of it.

    The root of a search is always searched, because the user has named it, but not the parts of a run in it.
    """
    inside = [*folders, *names]
    if folder == root:
        parts = _RUN_PARTS.intersection(inside) if _is_run(folder, inside) else set()
        outputs |= {os.path.join(folder, name): "of a run" for name in sorted(parts)}
        folders[:] = [name for name in folders if name not in parts]
        return [name for name in names if name not in parts]
    if kind := _output_in(folder, inside):
        outputs[folder] = kind
        folders.clear()
        return []
    return names


def _output_in(folder: str, names: Collection[str]) -> str:
    """Return the kind of output in a folder with these files and folders, such as "a run"; "" if there is none."""
    if _is_run(folder, names):
        return "a run"
    return next((kind for kind, name in _OUTPUTS.items() if any(map(name.fullmatch, names))), "")


def _is_run(folder: str, names: Collection[str]) -> bool:
    """Return whether a folder with these files and folders is a run folder; a run that starts has but its lease."""
    if {"config.toml", "metrics.jsonl"} <= set(names):
        return True
    lease = os.path.join(folder, "lease")
    return "lease" in names and os.path.isdir(lease) and any(map(_TAKEN.fullmatch, os.listdir(lease)))


def _leads_back(link: str, folder: str, real_root: str) -> bool:
    """Return whether a link in `folder` leads to a folder above it, or above the root of the search."""
    target = os.path.realpath(link)
    below = os.path.join(target, "")
    return any(os.path.join(place, "").startswith(below) for place in (os.path.realpath(folder), real_root))


def _raise_unreadable(error: OSError) -> None:
    raise DataError(f"data.sources: {error.filename} cannot be read: {error.strerror}") from error


def _match(base: str, pattern: str, outputs: dict[str, str]) -> list[str]:
    """Return the files and folders that match a glob below a folder, "" for the working folder. outputs: as in `_walk`.

    `glob` goes round and round where links lead back; so `**` is matched here, against the files of a search.
    """
    parts = pattern.split("/")
    if "**" not in parts:
        return _not_below_output(glob.glob(base + pattern), base, outputs)
    first = parts.index("**")
    roots = [base]
    if first:
        roots = _not_below_output(glob.glob(base + "/".join([*parts[:first], ""])), base, outputs)
    matches = []
    for root in filter(os.path.isdir, (root or "." for root in roots)):
        for file in _walk(root, outputs):
            path = file.removeprefix("./" if root == "." else "")
            if _fits(_below(path, "" if root == "." else root).split("/"), parts[first:]):
                matches.append(path)
    return matches


def _not_below_output(matches: Sequence[str], base: str, outputs: dict[str, str]) -> list[str]:
    """Return the matches of a glob without torchllm's own output, as `_without_output` does; the root is `base`."""
    if not matches:
        return []
    top = os.listdir(base or ".")
    kinds = {f"{base}{name}": "of a run" for name in _RUN_PARTS} if _is_run(base, top) else {}
    kept = []
    for match in matches:
        parts = _below(match, base).split("/")
        above = [base + "/".join(parts[: depth + 1]) for depth in range(len(parts))]
        for folder in above[:-1]:
            if folder not in kinds:
                kinds[folder] = _output_in(folder, os.listdir(folder))
        written = [path for path in above if kinds.get(path)]
        outputs |= {path: kinds[path] for path in written[:1]}
        if not written:
            kept.append(match)
    return kept


def _fits(names: Sequence[str], parts: Sequence[str]) -> bool:
    """Return whether the names of a path match the parts of a glob; ** stands for any number of folders."""
    if not parts:
        return not names
    if parts[0] == "**":
        following = parts[1:] or ["*"]
        return any(_fits(names[skipped:], following) for skipped in range(len(names)))
    if not names or (names[0].startswith(".") and not parts[0].startswith(".")):
        return False
    return fnmatchcase(names[0], parts[0]) and _fits(names[1:], parts[1:])
