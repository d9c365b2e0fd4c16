"""Errors that a user can act on. A failing candidate is a :class:`~autoflash.trial.Status`, never one of these."""


class AutoflashError(Exception):
    """Base class: the message names the offending value and what to do about it."""


class InvalidProblemError(AutoflashError, ValueError):
    """The arguments of a call do not describe an attention problem."""


class ExpressionError(InvalidProblemError):
    """A score_mod or mask_mod that the language of expressions does not have."""


class UnsupportedError(AutoflashError, NotImplementedError):
    """A meaningful request that no kernel here can compute; the message names the argument."""


class NoKernelError(AutoflashError, RuntimeError):
    """No kernel may run in this situation, for example an unloaded one inside a CUDA-graph capture."""


class DatabaseError(AutoflashError, RuntimeError):
    """The tuning database cannot be opened, created or written."""


class TableError(AutoflashError, ValueError):
    """An exported tuning table is damaged, of an unknown schema, or made for another device."""


class RenderError(AutoflashError, ValueError):
    """A template was asked for a form that it does not have."""


class CounterError(AutoflashError, RuntimeError):
    """The counters of a GPU cannot be read here; the message says why."""
