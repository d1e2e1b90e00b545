"""Ctrl-C, SIGTERM and a closed terminal: the first asks the run to finish its step and save, the second stops at once."""

from __future__ import annotations

import os
import signal
import stat
from collections.abc import Callable
from contextlib import suppress
from types import FrameType


class StopSignal:
    """Context in which `requested` turns true at the first signal and KeyboardInterrupt is raised at the second.

    A hangup is only ever a first one.
    """

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            if number == signal.SIGHUP and signal.getsignal(number) == signal.SIG_IGN:
                continue  # Under nohup the run is to outlive the terminal.
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        # A closing terminal tells twice: by the shell, and when that ends.
        if self.requested and number != signal.SIGHUP:
            raise KeyboardInterrupt
        if not self.requested:
            self.requested = True
            with suppress(OSError):
                self._notify(
                    "Stopping after this step; the run is saved then. Once more stops at once, without saving."
                )
        if number == signal.SIGHUP:
            _print_nowhere()


def _print_nowhere() -> None:
    """Sends what is printed from here on to nowhere, unless it goes to a file.

    To write to a closed terminal, or to a pipe whose reader went with it, is an error that would end the run unsaved.
    """
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for descriptor in (1, 2):
        with suppress(OSError):
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                os.dup2(nowhere, descriptor)
    os.close(nowhere)
