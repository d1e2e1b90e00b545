"""One error tree. Every message says what went wrong, where, why, and how to fix it."""

from __future__ import annotations

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_USAGE = 2
EXIT_PREFLIGHT = 3
EXIT_INTERRUPTED = 130


class OpdError(Exception):
    """An error that the user can act on.

    what:  one sentence, what went wrong
    where: the file and line, the configuration key, the step or the token
    why:   the reason, where `what` does not already give it
    fix:   what to type or change

    The command line prints at most these four lines and no traceback.
    """

    exit_code = EXIT_FAILED

    def __init__(self, what: str, *, where: str = "", why: str = "", fix: str = "") -> None:
        super().__init__(what)
        self.what = what
        self.where = where
        self.why = why
        self.fix = fix

    def __str__(self) -> str:
        parts = [self.what]
        parts += [f"{label}: {text}" for label, text in self.details()]
        return "\n".join(parts)

    def details(self) -> list[tuple[str, str]]:
        """The labelled parts after `what`, empty ones left out."""
        labelled = (("where", self.where), ("why", self.why), ("fix", self.fix))
        return [(label, text) for label, text in labelled if text]


class ConfigError(OpdError):
    """The recipe, an override or a flag is wrong. Holds all problems found, not the first."""

    exit_code = EXIT_USAGE

    def __init__(
        self, what: str, *, where: str = "", why: str = "", fix: str = "", problems: list[OpdError] | None = None
    ) -> None:
        super().__init__(what, where=where, why=why, fix=fix)
        self.problems = problems or []


class DataError(OpdError):
    """A data source is missing, malformed or empty."""

    exit_code = EXIT_USAGE


class PreflightError(OpdError):
    """Models, tokenizers or capabilities do not fit together; found before the first step."""

    exit_code = EXIT_PREFLIGHT


class RunDirectoryError(OpdError):
    """The run directory exists, is missing, or cannot be written."""

    exit_code = EXIT_USAGE


class CheckpointError(OpdError):
    """A checkpoint is torn, belongs to another model, or could not be written."""


class TrainingError(OpdError):
    """A run cannot go on: a non-finite loss, an empty step, an engine that disagrees with the student."""


class TeacherUnavailable(OpdError):
    """No teacher server answers any more; what was done so far has been saved."""


class Interrupted(OpdError):
    """The user or the system asked the run to stop; a checkpoint was saved."""

    exit_code = EXIT_INTERRUPTED
