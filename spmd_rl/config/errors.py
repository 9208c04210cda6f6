"""The one exception that means: the user's input is wrong, and one line says how to mend it."""


class UserError(ValueError):
    """Bad input. The message is one line: what, where, and what would be right. `main` prints it and exits with 2."""
