"""The one way to tell a user that something is wrong."""


class UserError(Exception):
    """A fault that the user can act on: what happened, where, and what to do.

    It reaches the console as one line without a traceback. Anything else that escapes a script is a
    bug in Shardmill and is logged with its traceback.

    Args:
        what: what is wrong, as a short clause.
        where: the file, config key, server or shard it is about.
        hint: what to do about it.
    """

    def __init__(self, what: str, *, where: str = "", hint: str = "") -> None:
        self.what = what
        self.where = where
        self.hint = hint
        super().__init__(str(self))

    def __str__(self) -> str:
        text = f"{self.where}: {self.what}" if self.where else self.what
        return f"{text}; {self.hint}" if self.hint else text
