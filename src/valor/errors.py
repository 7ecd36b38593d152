"""The errors a user can cause. The command line prints their text as one line and exits with code 2."""


class UserError(Exception):
    """A mistake in what was asked for: its message is one clear line that says what to do about it."""
