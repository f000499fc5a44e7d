"""Messages for a TOML file that cannot be read: the parser's errors in plain words, and files with similar names."""

import difflib
import re
from pathlib import Path

from torchllm.config.keys import dotted


def parser_message(error: str, text: str) -> str:
    """Return "LINE: MESSAGE" for an error of the TOML parser."""
    message = error
    line = str(max(1, text.rstrip("\n").count("\n") + 1))  # the last, unless the parser names one
    position = re.search(r" \(at (?:line (\d+), column \d+|end of document)\)", error)
    if position:
        message = error[: position.start()]
        line = position[1] or line
    if twice := re.fullmatch(r"Cannot declare \((.*)\) twice", message):
        section = dotted(tuple(re.findall(r"'([^']*)'", twice[1])))
        return f"{line}: section [{section}] is given twice"
    if message == "Cannot overwrite a value":
        return f"{line}: a key is given twice"
    if re.fullmatch(r"Illegal character '\\n'|Unterminated string|Expected \"'+\"", message):
        return f"{line}: a string has no closing quote"
    if message == "Invalid value" and position and position[1]:
        return f"{line}: invalid value: text needs quotes, and it is true and false"
    return f"{line}: {message}"


def near_files(path: Path) -> str:
    """Return the TOML files with names similar to the missing one, as text for a message."""
    if not path.name:
        return ""
    files = {*path.parent.glob("*.toml"), *Path("train_configs").rglob("*.toml")}
    close = difflib.get_close_matches(path.stem, {file.stem for file in files}, n=2, cutoff=0.7)
    return " or ".join(sorted(str(file) for file in files if file.stem in close))
