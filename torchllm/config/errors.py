"""The errors that are meant for the user rather than for the developer."""

from typing import Literal


class UserError(Exception):
    """Something the user can fix: the text says what is wrong, where, and what to do.

    Raised on every rank alike (the rank that finds it shares it first); only rank 0 prints it, without a traceback.
    """


class RefusedStart(UserError):
    """A start that is refused before anything is touched: the exit status is 2, as for a wrong config."""


ErrorKind = Literal["refused", "user_error"]
"""of an error that another attempt would have again: a RefusedStart, another UserError"""
