"""The one exception whose text is meant for the user: a sentence saying what, where, and what to do."""


class TrainerError(Exception):
    pass
