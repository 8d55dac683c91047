"""Start a Python program as a process with its own session, folder, variables and log, and wait for it."""

import contextlib
import multiprocessing
import os
import runpy
import signal
import sys
from multiprocessing.context import ForkServerContext, SpawnContext
from multiprocessing.process import BaseProcess
from pathlib import Path

HERE = Path(__file__).resolve().parent


def starter(fork: bool) -> ForkServerContext | SpawnContext:
    """Return how processes start: as forks of a server that has imported everything (preload.py), or by themselves."""
    os.environ["PYTHONPATH"] = os.pathsep.join((str(HERE), str(HERE.parents[1] / "scripts")))
    # The server has one thread, because a fork does not copy threads. `become` gives each child its own number
    os.environ["OMP_NUM_THREADS"] = "1"
    context = multiprocessing.get_context("forkserver" if fork else "spawn")
    if fork:
        context.set_forkserver_preload(["preload"])
    return context


def become(argv: list[str], variables: dict[str, str], folder: Path, log: Path) -> None:
    """Turn this process into `python *argv`."""
    os.setsid()
    os.chdir(folder)
    opened = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    for number in (1, 2):
        os.dup2(opened, number)
    sys.stdout.reconfigure(line_buffering=True)
    os.environ.clear()
    os.environ.update(variables)
    import torch

    torch.set_num_threads(int(variables["OMP_NUM_THREADS"]))
    sys.argv = argv
    sys.path.insert(0, str(Path(argv[0]).parent))
    runpy.run_path(argv[0], run_name="__main__")


def wait(process: BaseProcess, seconds: float) -> int | None:
    """Wait for a process and return its exit code. Kill it after these seconds; its code is None then."""
    process.join(seconds)
    code = process.exitcode
    kill(process)
    return code


def kill(process: BaseProcess) -> None:
    """Kill a process and all processes of its session."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join()
