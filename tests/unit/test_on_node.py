"""Tests of on_node.py with a simulated command and loggers. tests/commands and tests/faults use real processes."""

import os
import signal
import sys
from pathlib import Path

import pytest

from job import on_node

RUNS = None
KILLED = signal.SIGKILL  # a status of waitpid, like EXIT_1
EXIT_1 = 1 << 8
GAP = "{} on node1 ended before the training: its log is not complete"


@pytest.fixture
def node(monkeypatch):
    """Return a function that runs on_node.py with these statuses of waitpid.

    The function returns the exit code and the sent signals.
    """
    sent: list = []
    handlers: dict = {}
    monkeypatch.setattr(os, "kill", lambda pid, number: sent.append((pid, number)))
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    monkeypatch.setenv("RUN_DIR", ".")

    def run(command: int, stopped_by: int = 0, **loggers: int | None) -> tuple[int, list]:
        statuses = dict(enumerate((command, *loggers.values()), 4711))
        words = [f"{name}={pid}" for pid, name in enumerate(loggers, 4712)]

        def waitpid(pid: int, options: int) -> tuple[int, int]:
            if pid == 4711 and stopped_by:
                handlers[stopped_by](stopped_by, None)
            return (0, 0) if statuses[pid] is RUNS else (pid, statuses[pid])

        monkeypatch.setattr(os, "waitpid", waitpid)
        monkeypatch.setattr(sys, "argv", ["on_node.py", "node1", "rank 3", "4711", *words])
        with pytest.raises(SystemExit) as ended:
            on_node.main()
        return ended.value.code, sent

    return run


@pytest.mark.parametrize(("status", "code"), [(0, 0), (75 << 8, 75), (KILLED, 137)])
def test_the_exit_code_is_that_of_the_command_and_a_failure_is_noted(node, status, code):
    assert node(status)[0] == code
    notes = [path.read_text() for path in Path().glob("exit_codes")]
    assert [note.split(maxsplit=1)[1] for note in notes] == ([f"{code} rank 3 on node1\n"] if code else [])
    assert all(len(note.split()[0]) == 19 for note in notes), "19 digits are nanoseconds, which launch.py writes too"


@pytest.mark.parametrize(
    ("program", "status", "gap"),
    [("psrecord", 0, False), ("psrecord", EXIT_1, True), ("nvidia-smi", 0, True), ("nvidia-smi", KILLED, True)],
)
def test_a_logger_that_ends_before_the_command_is_noted_as_a_gap(node, program, status, gap):
    assert node(0, **{program: status}) == (0, []), "no signal goes to a logger that has ended"
    assert [path.read_text() for path in Path().glob("missing_node1")] == [GAP.format(program) + "\n"] * gap
    Path("missing_node1").unlink(missing_ok=True)
    node(0, stopped_by=signal.SIGTERM, **{program: status})
    assert not Path("missing_node1").exists(), "Slurm also sends the signal to the logger"


def test_loggers_that_still_run_are_stopped(node):
    loggers = {"psrecord": RUNS, "nvidia-smi": RUNS}
    assert node(EXIT_1, **loggers) == (1, [(4712, signal.SIGTERM), (4713, signal.SIGTERM)])


@pytest.mark.parametrize("number", on_node.SIGNALS)
def test_every_signal_except_the_warning_reaches_the_command_as_sigterm(node, number):
    forwarded = signal.SIGUSR1 if number == signal.SIGUSR1 else signal.SIGTERM
    assert node(75 << 8, stopped_by=number) == (75, [(4711, forwarded)])


def test_under_nohup_sighup_stays_ignored(monkeypatch):
    handlers: dict = {}
    monkeypatch.setattr(signal, "signal", handlers.__setitem__)
    for before, has_handler in ((signal.SIG_IGN, False), (signal.SIG_DFL, True)):
        handlers.clear()
        monkeypatch.setattr(signal, "getsignal", lambda number, before=before: before)
        on_node.forward_signals(4711, [])
        assert (signal.SIGHUP in handlers, signal.SIGINT in handlers) == (has_handler, True)


def test_a_note_on_a_full_disk_changes_nothing(node):
    """Folders in place of the notes simulate a full disk."""
    for name in ("exit_codes", "missing_node1"):
        Path(name).mkdir()
    assert node(EXIT_1, psrecord=EXIT_1)[0] == 1
