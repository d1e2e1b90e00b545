"""Ctrl-C and SIGTERM: the first asks the run to finish its step and save, the second stops at once."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType


class StopSignal:
    """Context in which `requested` turns true at the first signal and KeyboardInterrupt is raised at the second."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.requested = False
        self._notify = notify
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignal:
        for number in (signal.SIGINT, signal.SIGTERM):
            self._previous[number] = signal.signal(number, self._handle)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if self.requested:
            raise KeyboardInterrupt
        self.requested = True
        self._notify("Stopping after this step; the run is saved then. Once more stops at once, without saving.")
