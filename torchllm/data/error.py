"""The error of this package for the user."""

from torchllm.config.errors import UserError


class DataError(UserError, ValueError):
    """An error in the data; its text names the error, its place (file:line or row) and the remedy."""
