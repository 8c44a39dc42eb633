"""The one exception that people see."""


class UserError(Exception):
    """Something the user can mend: a wrong value, a missing file, a budget that cannot be met.

    Its text is the whole message: one or two short sentences that say what is wrong and what to do.
    Command-line front ends print it as ``error: ...`` without a stack trace and exit with status 1.
    """
