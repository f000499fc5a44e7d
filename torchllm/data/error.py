"""The one error of this package that is meant for the user."""

from torchllm.config.errors import UserError


class DataError(UserError, ValueError):
    """Something is wrong with the data: the text says what, where (file:line or row) and what to do."""
