"""Signals ask a run to finish its step; a second one, unless it comes from a closing terminal, stops it at once."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
# The exit code tells, because a hangup ends the printing.
SCRIPT = """
import os, signal, sys
from opd.interrupt import StopSignal
first, second, ignored = map(int, sys.argv[1:])
if ignored:
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
said = []
try:
    with StopSignal(said.append) as stop:
        os.kill(os.getpid(), first)
        os.kill(os.getpid(), second)
        os._exit(len(said))
except KeyboardInterrupt:
    os._exit(10 + len(said))
"""


@pytest.mark.parametrize(
    ("first", "second", "ignored", "code"),
    [
        (signal.SIGINT, signal.SIGINT, False, 11),
        (signal.SIGTERM, signal.SIGTERM, False, 11),
        (signal.SIGHUP, signal.SIGHUP, False, 1),
        (signal.SIGINT, signal.SIGHUP, False, 1),
        (signal.SIGHUP, signal.SIGTERM, False, 11),
        (signal.SIGHUP, signal.SIGHUP, True, 0),
    ],
)
def test_the_first_signal_asks_and_the_second_stops_but_a_hangup_only_asks_and_nohup_is_left_alone(
    first, second, ignored, code
):
    command = [sys.executable, "-c", SCRIPT, *(str(int(value)) for value in (first, second, ignored))]
    assert subprocess.run(command, cwd=ROOT, check=False).returncode == code
