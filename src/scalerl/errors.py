"""The errors that a user meets: one line each, and the exit status that goes with it."""

from __future__ import annotations


class ScalerlError(Exception):
    """Base of every error that `scalerl` raises on purpose; its text is one line for the user."""

    exit_status = 2


class InputError(ScalerlError):
    """The input or the usage is wrong: the text names file, line, column or key, and what would be right."""

    exit_status = 2


class CannotAnswerError(ScalerlError):
    """The input is sound, but the data cannot answer the question (too few points, no rise)."""

    exit_status = 3


class InterruptedRunError(ScalerlError):
    """The user stopped a run; the text says where the record is that it left."""

    exit_status = 130


class DivergedError(ScalerlError):
    """Training has left the finite numbers; the record up to there is kept."""

    exit_status = 1


class WorkerError(ScalerlError):
    """A process of the run died; what was written before is kept."""

    exit_status = 1


class WriteError(ScalerlError):
    """The record could not be written (a full disk, above all); what was written before is kept."""

    exit_status = 2
