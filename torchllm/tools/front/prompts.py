"""The prompts of recipes/generate.py. No torch."""

from pathlib import Path

from torchllm.config import Generate
from torchllm.config.errors import UserError


def read_prompts(settings: Generate) -> list[str]:
    """Return the prompt of the config, if there is one, and the lines of its file that are not empty.

    Raises UserError if the file cannot be read.
    """
    prompts = [settings.prompt] if settings.prompt else []
    if settings.prompts_file:
        try:
            text = Path(settings.prompts_file).read_text("utf-8-sig")  # editors of Windows write a byte order mark
        except (OSError, UnicodeDecodeError) as error:
            raise UserError(f"generate.prompts_file: {settings.prompts_file} cannot be read: {error}") from error
        prompts += [line for line in text.split("\n") if line.strip()]  # `splitlines` cuts at form feeds, too
    return prompts
