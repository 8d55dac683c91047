"""Tests of real ranks that hang or do not join.

tests/unit/test_watchdog.py tests which rank an error names.
"""

import json
import os
import re
import signal
import socket
from pathlib import Path

import pytest

from helpers import Finished, free_port
from workbench import Bench

HANG_TIMEOUT = 15  # seconds; even a busy machine must complete a step in this time
STOP_RANK_0 = """
from pathlib import Path
from training.callbacks import WatchdogCallback

original = WatchdogCallback.on_step_begin


def hang(self, args, state, control, **kwargs):
    original(self, args, state, control, **kwargs)
    if state.global_step == 3 and os.environ["RANK"] == "0":
        while not list(Path("results").glob(f".ranks_*_{os.environ['MASTER_PORT']}/0.json")):
            pass  # wait until the rank has written its position, as it does every HANG_TIMEOUT / 20 seconds
        os.kill(os.getpid(), signal.SIGSTOP)


WatchdogCallback.on_step_begin = hang
"""
HOST = re.escape(socket.gethostname())
LINE = r"(<frozen )?\S+:\d+ \S+"  # a file can be <frozen genericpath>, a function <genexpr>


def error_line(run: Finished) -> str:
    """The only error line, without the progress bar that may precede it."""
    (line,) = re.findall(r"error: .*", run.log)
    return line


def watchdog_folders(folder: Path) -> set[Path]:
    """Return the folders that watchdogs left, including those of runs that other tests have killed."""
    return set(folder.glob("results/.ranks_*"))


@pytest.mark.promise("reliability 12")
def test_a_stopped_rank_ends_the_job_with_its_name(bench: Bench):
    before = watchdog_folders(bench.folder)
    variables = {"JOB_ID": "hang", "BATCH_SIZE": 2, "HANG_TIMEOUT": HANG_TIMEOUT}
    ranks = bench.start(script=bench.patched(STOP_RANK_0, "hang.py"), ranks=2, **variables)
    ranks.until(lambda: "error: hang: " in ranks.err)
    os.kill(ranks.pids[0], signal.SIGCONT)
    run = ranks.wait()
    assert run.code == 3, run
    # The last position that rank 0 wrote may be in an earlier step
    assert re.match(
        rf"error: hang: no answer from rank 0 on {HOST} \(last heard: .+, at {LINE}\), stopped or out of reach, "
        rf"noticed by rank 1 on {HOST} \(step 4, at {LINE}\) after {HANG_TIMEOUT} s; ",
        error_line(run),
    ), run
    assert (run.record["status"], run.record["exit_code"]) == ("failed", 3), run
    assert f"error: hang: {run.record['reason']}; " in error_line(run)
    assert error_line(run).endswith("; the last collectives of the ranks are in results/hang_flight_record")
    assert "rank_1" in flight_records(run), "rank 0 could write its own after SIGCONT"
    assert watchdog_folders(bench.folder) == before


WAIT_IN_TWO_COLLECTIVES = """
import torch.distributed
from training.callbacks import WatchdogCallback

original = WatchdogCallback.on_step_begin


def hang(self, args, state, control, **kwargs):
    original(self, args, state, control, **kwargs)
    if state.global_step == 3:
        group = torch.distributed.new_group([0, 1])
        if os.environ["RANK"] == "0":
            torch.distributed.all_reduce(torch.zeros(7), group=group)


WatchdogCallback.on_step_begin = hang
"""


def flight_records(run: Finished) -> dict[str, list[dict]]:
    """Return the collectives that each rank has left."""
    folder = run.folder / "results" / f"{run.job_id}_flight_record"
    return {path.stem: json.loads(path.read_text())["entries"] for path in sorted(folder.glob("rank_*.json"))}


@pytest.mark.faults
@pytest.mark.promise("when a run hangs, each rank that still runs leaves its last collectives")
def test_two_ranks_that_wait_in_different_collectives_leave_their_flight_records(train):
    variables = {"BATCH_SIZE": 2, "HANG_TIMEOUT": HANG_TIMEOUT}
    run = train("differ", patch=WAIT_IN_TWO_COLLECTIVES, ranks=2, code=3, **variables)
    assert error_line(run).startswith("error: hang: no progress of rank ")
    records = flight_records(run)
    assert list(records) == ["rank_0", "rank_1"]
    for record in records.values():
        assert [entry["retired"] for entry in record[-3:]] == [True, True, False], "a rank waits in its last collective"
    first, second = (record[-1] for record in records.values())
    assert (first["profiling_name"], first["input_sizes"]) == ("gloo:all_reduce", [[7]])
    assert second["process_group"] != first["process_group"], "rank 1 continues with the training"


# A call that keeps Python's lock, as PyTorch's call does
BLOCKED_DRIVER = """
import ctypes, sys
sys.path.insert(0, "scripts")
from distributed import watchdog

watchdog.SECONDS_FOR_RANK_0 = 1
watchdog.distributed_c10d.is_initialized = lambda: True
watchdog.last_collectives = ctypes.PyDLL(None).pause
watchdog.Watchdog(20).write_flight_record()
"""


def test_a_gpu_driver_that_does_not_answer_cannot_keep_a_process(bench: Bench):
    world = {"WORLD_SIZE": 2, "RANK": 0, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port()}
    bench.run(script=bench.write("blocked.py", BLOCKED_DRIVER), code=-signal.SIGALRM, **world)


@pytest.mark.promise("reliability 12")
def test_rank_0_names_the_rank_that_is_missing(train):
    world = {"WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "RANK": 0, "LOCAL_RANK": 0}
    meet = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": free_port(), "JOIN_TIMEOUT": 2}
    run = train("join_0", code=3, **world, **meet)
    assert error_line(run) == "error: rendezvous: rank 1 did not join within 2 s; check that node, or exclude it"


@pytest.mark.promise("reliability 12")
def test_a_shell_of_srun_pty_names_missing_ranks_and_obeys_ctrl_c(bench: Bench):
    """Plain python in the shell of `srun --pty -n 4 bash` is one process, but Slurm's variables announce four."""
    slurm = {"SLURM_JOB_ID": 4711, "SLURM_STEP_NUM_TASKS": 4, "SLURM_PROCID": 0, "SLURM_LOCALID": 0}
    slurm |= {"SLURM_STEP_NODELIST": "localhost", "MASTER_PORT": free_port()}
    before = watchdog_folders(bench.folder)
    waiting = bench.start(**slurm)
    text = (
        "waiting for rank 1, rank 2, rank 3 to join (Ctrl-C ends this run); Slurm announces 4 tasks, so in a shell of"
    )
    waiting.until(lambda: text in waiting.out)
    os.kill(waiting.pids[0], signal.SIGINT)
    run = waiting.wait()
    assert run.code == 130, run
    assert watchdog_folders(bench.folder) == before
