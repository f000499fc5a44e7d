"""The error of this package that is meant for the user."""

from torchllm.config.errors import UserError


class DataError(UserError, ValueError):
    """An error in the data; its text says what is wrong, where (file:line or row) and what to do."""
