"""The one error type of the data tools."""


class DataError(Exception):
    """Input, tokeniser or output that cannot be used.

    Carries one message for the user, which names the file (and line or byte), what was found and
    what is allowed. The command line prints it and exits with code 2, with no traceback.
    """
