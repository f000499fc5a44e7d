"""The prompts of recipes/generate.py. No torch."""

from pathlib import Path

from torchllm.config import Generate
from torchllm.config.errors import UserError


def read_prompts(settings: Generate) -> list[str]:
    """Return the lines of the config's file of prompts that are not empty, or else its prompt, if there is one.

    Raises UserError if the file cannot be read.
    """
    if not settings.prompts_file:
        return [settings.prompt] if settings.prompt else []
    try:
        text = Path(settings.prompts_file).read_text("utf-8-sig")  # editors of Windows write a byte order mark
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"generate.prompts_file: {settings.prompts_file} cannot be read: {error}") from error
    return [line for line in text.split("\n") if line.strip()]  # `splitlines` cuts at form feeds, too
