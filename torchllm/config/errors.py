"""The one kind of error that is meant for the user rather than for us."""


class UserError(Exception):
    """Something the user can mend: the text says what is wrong, where, and what to do.

    Raised on every rank alike (whoever finds it shares it first); only rank 0 prints it, without a traceback.
    """
