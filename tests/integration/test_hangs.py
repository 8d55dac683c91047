"""Ranks that hang, do not come, or have nothing to reach, as processes. Who is named: tests/unit/test_watchdog.py."""

import re
import signal
import socket
import sys
from pathlib import Path

import psutil
import pytest

from helpers import REPOSITORY, TINY, Finished, Process, environment, free_port, patched

HANG_TIMEOUT = 15  # of seconds, in which a busy machine must do a step
HANGS = """
import os
import signal
import time

from training.callbacks import HeartbeatCallback

go_on = HeartbeatCallback.on_step_begin


def hang(self, args, state, control, **kwargs):
    go_on(self, args, state, control, **kwargs)
    if state.global_step == 3 and os.environ["RANK"] == "{rank}":
        {how}


HeartbeatCallback.on_step_begin = hang
"""
STOPPED = "os.kill(os.getpid(), signal.SIGSTOP)"
HOST = re.escape(socket.gethostname())
LINE = r"\S+:\d+ \S+"  # a function may be called <genexpr>
BY_HAND = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}


@pytest.fixture
def launched(workplace):
    """Starts a patched training by launch.py, with two ranks; nothing outlives the test."""
    started = []

    def start(name: str, patch: str) -> Process:
        script = patched(workplace, name, patch)
        command = [sys.executable, str(REPOSITORY / "scripts/launch.py"), "--nproc-per-node=2", script]
        values = TINY | {"HF_HOME": workplace / "hf", "JOB_ID": name, "HANG_TIMEOUT": HANG_TIMEOUT}
        variables = environment({key: str(value) for key, value in values.items()})
        started.append(Process(workplace, command, variables, name))
        return started[-1]

    yield start
    for process in started:
        process.kill()


def stopped_ranks(process: Process) -> list[psutil.Process]:
    ranks = psutil.Process(process.popen.pid).children(recursive=True)
    return [rank for rank in ranks if rank.is_running() and rank.status() == psutil.STATUS_STOPPED]


def the_line(run: Finished) -> str:
    """Without what a progress bar has left before it."""
    lines = re.findall(r"error: .*", run.log)
    assert len(lines) == 1, run
    return lines[0]


def files_of_ranks(run: Finished) -> list[Path]:
    return list((run.folder / "results").glob(".ranks_*"))


def test_a_stopped_rank_ends_the_job_with_its_name(launched):
    process = launched("hang-stopped", HANGS.format(rank=0, how=STOPPED))
    process.until(lambda: "error: hang: " in process.finished(None).log)
    for rank in stopped_ranks(process):  # or torchrun would kill it after 30 s
        rank.send_signal(signal.SIGCONT)
    run = process.wait()
    assert run.code == 3, run
    # what it last wrote may be of a step before
    assert re.match(
        rf"error: hang: no answer from rank 0 on {HOST} \(last heard: .+, at {LINE}\), stopped or out of reach, "
        rf"noticed by rank 1 on {HOST} \(step 4, at {LINE}\) after {HANG_TIMEOUT} s; ",
        the_line(run),
    ), run
    assert (run.record["status"], run.record["exit_code"]) == ("failed", 3), run
    assert files_of_ranks(run) == []


def test_a_rank_that_never_returns_from_a_call_is_named_with_its_line(launched):
    run = launched("hang-asleep", HANGS.format(rank=1, how="time.sleep(1000)")).wait()
    assert run.code == 3, run
    assert re.match(
        rf"error: hang: no progress of rank 1 on {HOST} \(step 4, at hang-asleep\.py:\d+ hang\), "
        rf"noticed by rank [01] on {HOST} \(step 4, at {LINE}\) after {HANG_TIMEOUT} s; ",
        the_line(run),
    ), run
    assert (run.record["status"], run.record["exit_code"]) == ("failed", 3), run
    assert files_of_ranks(run) == []


def by_hand(background, name: str, rank: int, **variables: object) -> Finished:
    port = free_port()
    values = BY_HAND | {"RANK": rank, "LOCAL_RANK": rank, "MASTER_PORT": port, "JOIN_TIMEOUT": 2} | variables
    return background(name, launcher="python", **values).wait()


def test_a_rank_that_cannot_reach_rank_0_says_so(background):
    run = by_hand(background, "join-1", 1)
    assert run.code == 3, run
    assert re.match(rf"error: MASTER_ADDR: {HOST} cannot reach 127\.0\.0\.1:\d+ .* within 2 s; ", the_line(run)), run
    assert not Path(run.record_path).exists()


def test_rank_0_names_the_rank_that_does_not_come(background):
    run = by_hand(background, "join-0", 0)
    assert run.code == 3, run
    assert the_line(run) == "error: rendezvous: rank 1 did not join within 2 s; check that node, or exclude it"


def test_a_loss_that_is_no_number_ends_both_ranks(background):
    run = background("nan", processes=2, LEARNING_RATE="1e30", SAVE_STRATEGY="no").wait()
    assert run.code == 1, run
    assert the_line(run).startswith("error: loss: is not finite since step 2 (3 steps in a row); "), run
    assert (run.record["status"], run.record["exit_code"]) == ("failed", 1), run
    assert "Traceback" not in run.log.partition("torch/distributed/elastic")[0], run
