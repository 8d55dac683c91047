"""A folder in which a test starts training runs as forked processes, and helpers for the files that they leave."""

import contextlib
import dataclasses
import json
import os
import re
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from helpers import (
    LAUNCHERS,
    LIMIT,
    NOTHING_COMPILED,
    REPOSITORY,
    TINY,
    Finished,
    RunFiles,
    free_port,
    inherited,
    make_workplace,
    until,
)
from server import READ_AT_IMPORT, Request

SERVER = Path(__file__).with_name("server.py")
SECONDS_TO_END = 10  # processes such as the reader of a run's output may end this much later
# A training run of 4 steps in two epochs, with a checkpoint after each epoch
SMALL = TINY | {
    "TRAIN_SIZE": "4",
    "EVAL_SIZE": "2",
    "MAX_LENGTH": "192",
    "PADDING": "longest",
    "BATCH_SIZE": "2",
    "GRAD_ACC": "1",
    "JOB_ID": "7",
}


class Server:
    """The server.py process and the exit codes that it has reported."""

    def __init__(self, folder: Path):
        # All runs use the CPU, so their losses can be compared
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        self.environment = inherited() | NOTHING_COMPILED | own
        self.folder = folder
        self.trained: dict[str, Finished] = {}
        self.codes: dict[int, int] = {}  # exit code by process id, in the order in which the processes ended
        self.rest = b""
        self.channel, far = socket.socketpair()
        words = [sys.executable, str(SERVER), str(far.fileno())]
        self.log = folder / "server.log"
        with self.log.open("wb") as log, far:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": log}
            # In a separate session, the server does not get pytest's Ctrl-C; it must first end its cases
            self.popen = subprocess.Popen(
                words, env=self.environment, pass_fds=[far.fileno()], start_new_session=True, **streams
            )
        self.answer("ready", LIMIT)

    def start(self, request: Request) -> int:
        self.channel.sendall(json.dumps(request).encode() + b"\n")
        return self.answer("pid", LIMIT)

    def answer(self, key: str, seconds: float) -> int:
        """Wait for the next answer that has `key`. Exit codes that arrive with it are stored."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for found in self.answers(left):
                if key in found:
                    return found[key]
        raise AssertionError(f"the server did not answer: {self.log.read_text()}")

    def answers(self, seconds: float) -> list[dict]:
        """Return the messages that the server sends within `seconds`; the list may be empty."""
        if not select.select([self.channel], [], [], seconds)[0]:
            return []
        received = self.channel.recv(65536)
        assert received, f"the server has ended: {self.log.read_text()}"
        *lines, self.rest = (self.rest + received).split(b"\n")
        found = [json.loads(line) for line in lines]
        for each in found:
            if "ended" in each:
                self.codes[each["ended"]] = each["code"]
            elif "pid" in each:  # an earlier process may have had this id
                self.codes.pop(each["pid"], None)
        return found

    def wait(self, pid: int, seconds: float) -> int | None:
        """Wait for a process and return its exit code; None if it is still running after `seconds`."""
        deadline = time.monotonic() + seconds
        while pid not in self.codes and (left := deadline - time.monotonic()) > 0:
            self.answers(left)
        return self.codes.get(pid)

    def living(self) -> list[psutil.Process]:
        """Running processes of the cases, including orphans, which the server adopts."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        return [child for child in children if command_line(child)]

    def close(self) -> None:
        self.channel.close()
        self.popen.wait()


def command_line(process: psutil.Process) -> str:
    """Command line of a process; empty if the process has ended."""
    try:
        return " ".join(process.cmdline()) or process.name() * (process.status() != psutil.STATUS_ZOMBIE)
    except psutil.Error:
        return ""


def kill(processes: list[psutil.Process]) -> None:
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    psutil.wait_procs(processes, LIMIT)


class Running(RunFiles):
    """A running command of one process or several ranks. `wait` returns its `Finished`."""

    def __init__(self, bench: "Bench", command: str, folder: Path, job_id: str):
        self.server, self.limit = bench.server, bench.limit
        self.command, self.folder, self.job_id = command, folder, job_id
        self.pids: list[int] = []
        self.streams: list[Path] = []  # stdout and stderr of each rank

    @property
    def code(self) -> int | None:
        """Exit code of the first failed rank; 0 if all ranks have succeeded; None while ranks are running."""
        codes = [code for pid, code in self.server.codes.items() if pid in self.pids]
        return next(filter(None, codes), 0 if len(codes) == len(self.pids) else None)

    @property
    def out(self) -> str:
        return "".join(map(read_output, self.streams[::2]))

    @property
    def err(self) -> str:
        return "".join(map(read_output, self.streams[1::2]))

    @property
    def log(self) -> str:
        return self.out + self.err

    def until(self, condition: Callable[[], object]) -> object:
        """Poll until `condition` is true, and return its value. Fail if the first rank ends earlier."""
        try:
            return until(condition, self.limit, lambda: self.server.wait(self.pids[0], 0.01) is not None, self)
        except AssertionError:
            self.kill()
            raise

    def wait(self) -> Finished:
        """Wait for the end. When a rank fails, send SIGTERM to the other ranks, as torchrun does."""
        deadline = time.monotonic() + self.limit
        terminated = False
        while running := [pid for pid in self.pids if pid not in self.server.codes]:
            if self.code and not terminated:
                terminated = True
                for pid in running:
                    with contextlib.suppress(ProcessLookupError):
                        os.kill(pid, signal.SIGTERM)
            if time.monotonic() > deadline:
                self.kill()
                raise AssertionError(f"still running after {self.limit} s\n{self}")
            self.server.answers(max(0.01, deadline - time.monotonic()))
        return Finished(self.command, self.folder, self.job_id, self.code, self.out, self.err)

    def kill(self) -> None:
        """Kill each remaining process by its id. A process group is not enough: torchrun starts a session per rank."""
        for pid in set(self.pids) - self.server.codes.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                kill([*parent.children(recursive=True), parent])


def read_output(stream: Path) -> str:
    """Output of a process so far, with line ends for the carriage returns of progress bars."""
    return re.sub(r"\r+", "\n", stream.read_text(encoding="utf-8", errors="replace"))


class Bench:
    """A folder of one test, in which the pages' commands work as printed.

    knobs: variables of each run. limit: seconds that a run may take.
    """

    def __init__(self, server: Server, folder: Path, knobs: dict[str, str] = SMALL, limit: float = LIMIT):
        self.server, self.knobs, self.limit = server, knobs, limit
        self.folder = make_workplace(folder)
        self.number = 0
        self.python = Path(sys.executable)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def names(self) -> set[str]:
        """Return every file and folder below this folder, without following links."""
        found = set()
        for top, folders, files in os.walk(self.folder):
            found |= {str((Path(top) / name).relative_to(self.folder)) for name in (*folders, *files)}
        return found

    def start(
        self,
        *words: object,
        script: str | Path = "scripts/train.py",
        launcher: str = "",
        ranks: int = 0,
        cwd: Path | None = None,
        stdout: str | Path = "",
        stderr: str | Path = "",
        **variables: object,
    ) -> Running:
        """Start a Python script or another program.

        launcher: one of `helpers.LAUNCHERS`, which starts the script as a command; without one the server forks.
        ranks: number of processes, which get torchrun's variables; 0 means plain python.
        variables: environment variables; the value "unset" removes one.
        """
        known = self.server.environment
        environment = known | self.knobs | {name: str(value) for name, value in variables.items()}
        environment = {name: value for name, value in environment.items() if value != "unset"}
        argv = [str(word) for word in (script, *words)]
        is_python = argv[0].endswith(".py")
        changed = sorted(name for name in environment | known if environment.get(name) != known.get(name))
        if is_python and not launcher and any(name.startswith(READ_AT_IMPORT) for name in changed):
            launcher = "python"
        if launcher:
            argv = [*LAUNCHERS[launcher](ranks), *argv]
        shown = " ".join([*(f"{name}={environment.get(name, '')}" for name in changed), *argv])
        job_id = environment.get("JOB_ID") or environment.get("SLURM_JOB_ID", "")
        running = Running(self, shown, cwd or self.folder, job_id)
        self.number += 1
        for rank, world in enumerate(launch_variables(ranks, launcher)):
            own = [self.folder.parent / f"{self.number}.{rank}.{name}" for name in ("out", "err")]
            for path in own:  # a test may read these files before the process has created them
                path.touch()
            request: Request = {
                "fork": is_python and not launcher,
                "argv": argv,
                "cwd": str(running.folder),
                "environment": environment | {name: str(value) for name, value in world.items()},
                "stdout": str(stdout or own[0]),
                "stderr": str(stderr or own[1]),
            }
            running.streams += own
            running.pids.append(self.server.start(request))
        return running

    def run(self, *words: object, code: int = 0, **options: object) -> Finished:
        """Run to the end. With an exit code other than `code`, fail and show the command and the end of the log."""
        ended = self.start(*words, **options).wait()
        assert ended.code == code, f"expected exit code {code}\n{ended}"
        return ended

    def refuses(self, line: str, *words: object, code: int = 2, **options: object) -> Finished:
        """Run a command that must end with this error line ("..." matches anything) and must not write a file."""
        before = self.names()
        ended = self.run(*words, code=code, **options)
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert re.fullmatch(pattern, ended.error), f"{ended.error}\nexpected: {line}"
        assert self.names() == before, "the run wrote files"
        return ended

    def trained(self, *words: object, **options: object) -> Finished:
        """Return a successful run. It runs once per session, and its files are copied into this folder."""
        key = repr((self.knobs, words, sorted(options.items())))
        if key not in self.server.trained:
            folder = self.server.folder / f"trained {len(self.server.trained)}"
            ended = Bench(self.server, folder, self.knobs).run(*words, **options)
            self.server.trained[key] = ended
        ended = self.server.trained[key]
        for name in ("output", "results"):
            shutil.copytree(ended.folder / name, self.folder / name)
        return dataclasses.replace(ended, folder=self.folder)

    def reference(self, *words: object, **options: object) -> Finished:
        """Return the same training without a disturbance, in the folder `reference` next to this one."""
        return Bench(self.server, self.folder.parent / "reference", self.knobs).trained(*words, **options)

    def patched(self, patch: str, name: str = "patched.py") -> Path:
        """Write a script that runs the lines `patch` before train.py, such as a `patch_call`."""
        first = f"import os, signal, sys\nsys.path.insert(0, {str(REPOSITORY / 'scripts')!r})\nimport train\n"
        return self.write(name, f"{first}{patch}\ntrain.run_and_exit(train.main)\n")

    @contextlib.contextmanager
    def small_disk(self, name: str, size: int) -> Iterator[None]:
        """Mount a file system of `size` bytes at a folder. Skip the test if this machine does not allow a mount."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mounting, capture_output=True).returncode:
            pytest.skip("the test needs to mount a small disk, which this machine does not allow")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)

    def close(self) -> list[str]:
        """Kill the processes that still run SECONDS_TO_END after the test, and return their commands."""
        deadline = time.monotonic() + SECONDS_TO_END
        while (living := self.server.living()) and time.monotonic() < deadline:
            self.server.wait(0, 0.02)
        left = [f"{process.pid} {command_line(process)}" for process in living]
        kill(living)
        return left


def launch_variables(ranks: int, launcher: str) -> list[dict]:
    """Return the variables of each process: those of torchrun for a rank, otherwise the port that torchrun must use."""
    port = free_port()
    if launcher not in ("", "python"):
        return [{"PET_MASTER_PORT": port}]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)] or [{}]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STEP = "transformers.Trainer.training_step"
# Run `lines` just before the `call`-th call of a function
CALL_PATCH = """
import {module}
original, calls = {module}.{name}, []
def replaced(*args, **kwargs):
    calls.append(args)
    if len(calls) == {call}:
        {lines}
    return original(*args, **kwargs)
{module}.{name} = replaced
"""


def patch_call(target: str, call: int = 1, lines: str = KILL) -> str:
    """A patch that runs `lines` when the `call`-th call of a function or method (``json_files.write_json``) begins."""
    *modules, name = target.split(".")
    if modules[-1][0].isupper():  # the function is a method of this class
        name = f"{modules.pop()}.{name}"
    return CALL_PATCH.format(module=".".join(modules), name=name, call=call, lines=lines)


def complete_marks(folder: Path) -> dict[str, bool]:
    """Map the name of each checkpoint to True if the checkpoint is marked as complete."""
    return {path.name: (path / "complete.json").exists() for path in sorted(folder.glob("checkpoint-*"))}


def same_weights(ended: Finished, reference: Finished) -> bool:
    """True if the two runs have saved bitwise equal models."""
    name = "model.safetensors"
    return (ended.output / name).read_bytes() == (reference.output / name).read_bytes()


def same_training(ended: Finished, reference: Finished) -> bool:
    return same_weights(ended, reference) and ended.losses == reference.losses
