"""Advice about a path in the config that matches no file, e.g. a URL, a variable or a list."""

import glob
import os
import re

from torchllm.config.files import is_url


def describe_missing(path: str) -> str:
    """Return advice about a path that matches no file, as the end of an error."""
    if is_url(path):
        return "the storage has no object of this name, or below it"
    if "$" in path:
        return "variables in it are not replaced: write the path itself"
    if path.lstrip().startswith("[") and path.rstrip().endswith("]") and any(sign in path for sign in ",\"'"):
        return "it looks like a list: give one [[data.sources]] table per path"
    if re.search(r"\{[^{}]*[,.][^{}]*\}", path):
        return "braces are no part of a glob: give one [[data.sources]] table per path"
    if (literal := path.replace("[", "[[]")) != path and glob.glob(literal):
        return f"[...] in it stands for one character: write {literal!r} for a name with brackets"
    if "," in path or "\n" in path:
        return "if it is several paths, give one [[data.sources]] table for each"
    if os.path.isabs(path):
        return "check the path"
    return f"the path is relative to the folder where the command was started, {os.getcwd()}"
