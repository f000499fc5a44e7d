"""Errors for the user rather than for the developer."""


class UserError(Exception):
    """An error that the user can fix: the text names the error, its place and the remedy.

    Raised on every rank (the rank that finds it shares it first); only rank 0 prints it, without a traceback.
    """


class RefusedStart(UserError):
    """Refuses to start a run before any file is changed: exit status 2, as for a wrong config."""


class DataError(UserError, ValueError):
    """An error in the data; its text names the error, its place (file:line or row) and the remedy."""
