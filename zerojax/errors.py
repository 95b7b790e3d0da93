"""The one exception that means "the input is wrong". This module keeps it where every other can reach it."""


class UserError(ValueError):
    """Says in one line which rule broke, the value, the place and the way out.

    The command lines print it without a traceback and leave with status 2.
    """
