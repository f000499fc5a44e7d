"""Advice about a path in the config that matches no file, e.g. a URL, a variable or a list."""

import glob
import os
import re


def describe_missing(path: str) -> str:
    """Return advice about a path that matches no file, as the end of an error."""
    if re.match(r"[A-Za-z][A-Za-z0-9+.-]+://", path):
        return (
            "it is a URL, and files on this machine are read: download it. For a data set of the Hugging Face hub set "
            'kind = "hub", and path to its id, such as "HuggingFaceFW/fineweb-edu"'
        )
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
