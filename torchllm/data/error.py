"""The one error of this package that is meant for the user."""


class DataError(Exception):
    """Something is wrong with the data: the text says what, where (file:line or row) and what to do."""
