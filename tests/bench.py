"""Where a test runs trainings: a folder, the scripts as forked processes, and what they leave."""

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
SECONDS_TO_END = 10  # of what ends with a run, but not before it, such as the reader of its output
# A training of 4 steps in two epochs, with a checkpoint behind each
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
    """The process of server.py, and what it has told so far."""

    def __init__(self, folder: Path):
        # on the CPU everywhere, so that losses can be compared
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        self.environment = inherited() | NOTHING_COMPILED | own
        self.folder = folder
        self.trained: dict[str, Finished] = {}
        self.codes: dict[int, int] = {}  # in the order in which the processes ended
        self.rest = b""
        self.channel, far = socket.socketpair()
        words = [sys.executable, str(SERVER), str(far.fileno())]
        self.log = folder / "server.log"
        with self.log.open("wb") as log, far:
            streams = {"stdin": subprocess.DEVNULL, "stdout": subprocess.DEVNULL, "stderr": log}
            # not ended by a Ctrl-C to all of pytest's processes: it has cases to end first
            self.popen = subprocess.Popen(
                words, env=self.environment, pass_fds=[far.fileno()], start_new_session=True, **streams
            )
        self.answer("ready", LIMIT)

    def start(self, request: Request) -> int:
        self.channel.sendall(json.dumps(request).encode() + b"\n")
        return self.answer("pid", LIMIT)

    def answer(self, key: str, seconds: float) -> int:
        """The next answer of this kind; notes the ends of processes that come with it."""
        deadline = time.monotonic() + seconds
        while (left := deadline - time.monotonic()) > 0:
            for found in self.answers(left):
                if key in found:
                    return found[key]
        raise AssertionError(f"the server does not answer: {self.log.read_text()}")

    def answers(self, seconds: float) -> list[dict]:
        """Messages that the server sends within these seconds; empty if there is none."""
        if not select.select([self.channel], [], [], seconds)[0]:
            return []
        received = self.channel.recv(65536)
        assert received, f"the server has ended: {self.log.read_text()}"
        *lines, self.rest = (self.rest + received).split(b"\n")
        found = [json.loads(line) for line in lines]
        for each in found:
            if "ended" in each:
                self.codes[each["ended"]] = each["code"]
            elif "pid" in each:  # the system gives numbers anew: this one may have been a process that has ended
                self.codes.pop(each["pid"], None)
        return found

    def wait(self, pid: int, seconds: float) -> int | None:
        """Exit code of a process, None if it has not ended by then."""
        deadline = time.monotonic() + seconds
        while pid not in self.codes and (left := deadline - time.monotonic()) > 0:
            self.answers(left)
        return self.codes.get(pid)

    def living(self) -> list[psutil.Process]:
        """The processes of the cases, and orphans that they have left: none is out of the server's reach."""
        children = psutil.Process(self.popen.pid).children(recursive=True)
        return [child for child in children if command_of(child)]

    def close(self) -> None:
        self.channel.close()
        self.popen.wait()


def command_of(process: psutil.Process) -> str:
    """Its command line; nothing, if it has ended."""
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
    """A command that runs, as one process or as several ranks; `wait` returns its `Finished`."""

    def __init__(self, bench: "Bench", command: str, folder: Path, job_id: str):
        self.server, self.limit = bench.server, bench.limit
        self.command, self.folder, self.job_id = command, folder, job_id
        self.pids: list[int] = []
        self.streams: list[Path] = []  # stdout and stderr of each rank

    @property
    def code(self) -> int | None:
        """Exit code of the first rank that failed; 0 once all have ended well, None before."""
        codes = [code for pid, code in self.server.codes.items() if pid in self.pids]
        return next(filter(None, codes), 0 if len(codes) == len(self.pids) else None)

    @property
    def out(self) -> str:
        return "".join(map(text_of, self.streams[::2]))

    @property
    def err(self) -> str:
        return "".join(map(text_of, self.streams[1::2]))

    @property
    def log(self) -> str:
        return self.out + self.err

    def until(self, condition: Callable[[], object]) -> object:
        """Poll until `condition` is true, and return its value; fail when the first rank ends before."""
        try:
            return until(condition, self.limit, lambda: self.server.wait(self.pids[0], 0.01) is not None, self)
        except AssertionError:
            self.kill()
            raise

    def wait(self) -> Finished:
        """Wait for the end. As torchrun does, send SIGTERM to the other ranks when one has failed."""
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
        """End what still runs, by its id. torchrun gives each rank a session of its own, so a group is not enough."""
        for pid in set(self.pids) - self.server.codes.keys():
            with contextlib.suppress(psutil.NoSuchProcess):
                parent = psutil.Process(pid)
                kill([*parent.children(recursive=True), parent])


def text_of(stream: Path) -> str:
    """Output of a process so far. Carriage returns of the progress bars become line ends."""
    return re.sub(r"\r+", "\n", stream.read_text(encoding="utf-8", errors="replace"))


class Bench:
    """A folder of its own, in which the documents' commands work as printed.

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

    def write_pipe(self, name: str) -> None:
        """Let the process go on that reads a FIFO here."""
        with (self.folder / name).open("w"):
            pass

    def names(self) -> set[str]:
        """Every file and folder here, links not followed."""
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
        """Start a script of Python, or another program.

        launcher: one of `helpers.LAUNCHERS`, to start the script as on the command line; without one it is forked.
        ranks: as many processes, with the variables that torchrun sets; 0 is plain python. variables: "unset" takes
        one away.
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
        for rank, world in enumerate(worlds(ranks, launcher)):
            own = [self.folder.parent / f"{self.number}.{rank}.{name}" for name in ("out", "err")]
            for path in own:  # also for who looks before the process has begun to write
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
        """Run to the end; any other exit code than `code` fails with the command and the end of the log."""
        ended = self.start(*words, **options).wait()
        assert ended.code == code, f"exit code {code} expected\n{ended}"
        return ended

    def refuses(self, line: str, *words: object, code: int = 2, **options: object) -> Finished:
        """Run what must end with this error line, where "..." stands for anything, and write nothing."""
        before = self.names()
        ended = self.run(*words, code=code, **options)
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert re.fullmatch(pattern, ended.error), f"{ended.error}\nexpected: {line}"
        assert self.names() == before, "something was written"
        return ended

    def trained(self, *words: object, **options: object) -> Finished:
        """A run that has ended well, as if it had been done here: it is done once per session."""
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
        """The same training, undisturbed, in a folder beside this one."""
        return Bench(self.server, self.folder.parent / "reference", self.knobs).trained(*words, **options)

    def patched(self, patch: str, name: str = "patched.py") -> Path:
        """A script that runs train.py after these lines: the way to stop it at a moment."""
        first = f"import os, signal, sys\nsys.path.insert(0, {str(REPOSITORY / 'scripts')!r})\nimport train\n"
        return self.write(name, f"{first}{patch}\ntrain.run_and_exit(train.main)\n")

    @contextlib.contextmanager
    def small_disk(self, name: str, size: int) -> Iterator[None]:
        """A folder on a file system of its own of so many bytes; where nothing can be mounted the test is skipped."""
        folder = self.folder / name
        folder.mkdir(parents=True)
        mounting = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
        if subprocess.run(mounting, capture_output=True).returncode:
            pytest.skip("it needs a small disk, and nothing can be mounted here")
        try:
            yield
        finally:
            subprocess.run(["umount", "--lazy", str(folder)], check=True)

    def close(self, seconds: float = SECONDS_TO_END) -> list[str]:
        """End what this test has left so long after it; gives the commands."""
        deadline = time.monotonic() + seconds
        while (living := self.server.living()) and time.monotonic() < deadline:
            self.server.wait(0, 0.02)
        left = [f"{process.pid} {command_of(process)}" for process in living]
        kill(living)
        return left


def worlds(ranks: int, launcher: str) -> list[dict]:
    """Variables for each process to start: those that torchrun would set, or the port that torchrun is to take."""
    port = free_port()
    if launcher not in ("", "python"):
        return [{"PET_MASTER_PORT": port}]
    common = {"WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return [common | {"RANK": rank, "LOCAL_RANK": rank} for rank in range(ranks)] or [{}]


KILL = "os.kill(os.getpid(), signal.SIGKILL)"
STEP = "transformers.Trainer.training_step"
# A function of which the call number `call` is replaced by `lines`, which may call `original`
MOMENT = """
import {module}
original, calls = {module}.{name}, []
def replaced(*args, **kwargs):
    calls.append(args)
    if len(calls) == {call}:
        {lines}
    return original(*args, **kwargs)
{module}.{name} = replaced
"""


def moment(target: str, call: int = 1, lines: str = KILL) -> str:
    """The patch that does something as the `call`-th call of a function or method begins: ``json_files.write_json``."""
    *modules, name = target.split(".")
    if modules[-1][0].isupper():  # a class
        name = f"{modules.pop()}.{name}"
    return MOMENT.format(module=".".join(modules), name=name, call=call, lines=lines)


def complete(folder: Path) -> dict[str, bool]:
    """Name of each checkpoint, and whether it is marked as complete."""
    return {path.name: (path / "complete.json").exists() for path in sorted(folder.glob("checkpoint-*"))}


def same_weights(ended: Finished, reference: Finished) -> bool:
    """Whether both have saved the same model, to the last bit."""
    name = "model.safetensors"
    return (ended.output / name).read_bytes() == (reference.output / name).read_bytes()


def same_training(ended: Finished, reference: Finished) -> bool:
    return same_weights(ended, reference) and ended.losses == reference.losses
