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
from dataclasses import dataclass
from pathlib import Path

import psutil
import pytest

from helpers import INHERITED, NOTHING_COMPILED, REPOSITORY, Finished, free_port, make_workplace, the_error
from server import READ_AT_IMPORT, Request

SERVER = Path(__file__).with_name("server.py")
LIMIT = 120  # seconds, of what takes one or two: the machine may be slow and busy, and a hang must end
SECONDS_TO_END = 10  # of what ends with a run, but not before it, such as the reader of its output
# A training of 4 steps in two epochs, with a checkpoint behind each
SMALL = {
    "MODEL_NAME": "tiny-bloom",
    "DATASET": "data/squad_sample.json",
    "TRAIN_SIZE": "4",
    "EVAL_SIZE": "2",
    "MAX_LENGTH": "192",
    "PADDING": "longest",
    "FP16": "False",
    "BATCH_SIZE": "2",
    "GRAD_ACC": "1",
    "NUM_EPOCHS": "2",
    "LEARNING_RATE": "2e-3",
    "EM_F1": "False",
    "JOB_ID": "7",
}


class Server:
    """The process of server.py, and what it has told so far."""

    def __init__(self, folder: Path):
        here = {name: os.environ[name] for name in INHERITED if name in os.environ}
        own = {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "hf"), "HF_HUB_OFFLINE": "1"}
        self.environment = here | NOTHING_COMPILED | own
        self.folder = folder
        self.trained: dict[str, Ended] = {}
        self.codes: dict[int, int] = {}
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
        while True:
            for found in self.answers(deadline - time.monotonic()):
                if key in found:
                    return found[key]

    def answers(self, seconds: float) -> list[dict]:
        """What the server says within these seconds, at least one line, else nothing."""
        if not select.select([self.channel], [], [], max(0, seconds))[0]:
            assert seconds > 0, f"the server does not answer: {self.log.read_text()}"
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
        while pid not in self.codes:
            left = deadline - time.monotonic()
            if left <= 0:
                return None
            self.answers(left)
        return self.codes[pid]

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


@dataclass
class Ended(Finished):
    """`code`: of the first rank that failed. `log`: stdout, then stderr, of all ranks."""

    out: str = ""
    err: str = ""

    @property
    def error(self) -> str:
        """The one error line."""
        return the_error(self.err).removeprefix("error: ")


class Running:
    """A script that runs, as one process or as several ranks."""

    def __init__(self, server: Server, pids: list[int], words: list[str], folder: Path, streams: list[Path], job: str):
        self.server, self.pids, self.words, self.folder, self.job = server, pids, words, folder, job
        self.streams = streams

    def until(self, condition: Callable[[], object]) -> object:
        """Poll until `condition` is true, and return its value; fail when the process ends before."""
        deadline = time.monotonic() + LIMIT
        while True:
            ended = self.server.wait(self.pids[0], 0.01)
            if value := condition():
                return value
            assert ended is None, f"ended too early\n{self.wait()}"
            assert time.monotonic() < deadline, f"did not happen within {LIMIT} s\n{self.wait(0)}"

    def wait(self, seconds: float = LIMIT) -> Ended:
        """The end. As torchrun does, SIGTERM goes to the other ranks when one has failed."""
        deadline = time.monotonic() + seconds
        failed = None
        while (codes := [self.server.codes.get(pid) for pid in self.pids]).count(None):
            if failed is None and (failed := next((code for code in codes if code), None)) is not None:
                for pid, code in zip(self.pids, codes, strict=True):
                    if code is None:
                        with contextlib.suppress(ProcessLookupError):
                            os.kill(pid, signal.SIGTERM)
            if time.monotonic() > deadline:
                break
            self.server.answers(max(0.01, deadline - time.monotonic()))
        code = failed if failed is not None else next((code for code in codes if code), codes[0])
        text = [path.read_text(encoding="utf-8", errors="replace") if path.is_file() else "" for path in self.streams]
        out, err = ("".join(re.sub(r"\r+", "\n", part) for part in text[kind::2]) for kind in (0, 1))
        return Ended(" ".join(self.words), code, out + err, self.folder, self.job, out, err)


class Bench:
    """A folder of its own, in which the documents' commands work as printed."""

    def __init__(self, server: Server, folder: Path):
        self.server = server
        self.folder = make_workplace(folder)
        self.number = 0
        self.python = Path(sys.executable)

    def write(self, name: str, content: str | bytes) -> Path:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
        return path

    def until(self, condition: Callable[[], object]) -> None:
        """Poll until `condition` is true, when no process of the test can tell of it any more."""
        deadline = time.monotonic() + LIMIT
        while not condition():
            assert time.monotonic() < deadline, f"did not happen within {LIMIT} s"
            self.server.wait(0, 0.02)

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
        fork: bool = True,
        ranks: int = 0,
        cwd: Path | None = None,
        stdout: str | Path = "",
        stderr: str | Path = "",
        **variables: object,
    ) -> Running:
        """Start a script of Python, or another program.

        fork=False: a new interpreter, as on the command line. ranks: as many processes, with the variables that
        torchrun sets; 0 is plain python. variables: "unset" takes one away.
        """
        environment = self.server.environment | (SMALL | {name: str(value) for name, value in variables.items()})
        environment = {name: value for name, value in environment.items() if value != "unset"}
        argv = [str(word) for word in (script, *words)]
        is_python = argv[0].endswith(".py")
        known = self.server.environment
        changed = {name for name in environment | known if environment.get(name) != known.get(name)}
        fork = fork and is_python and not any(name.startswith(READ_AT_IMPORT) for name in changed)
        if is_python and not fork:
            argv = [sys.executable, *argv]
        self.number += 1
        streams = []
        pids = []
        port = free_port()
        for rank in range(ranks or 1):
            own = [self.folder.parent / f"{self.number}.{rank}.{name}" for name in ("out", "err")]
            for path in own:  # also for who looks before the process has begun to write
                path.touch()
            world = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": ranks, "LOCAL_WORLD_SIZE": ranks}
            world |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
            request: Request = {
                "fork": fork,
                "argv": argv,
                "cwd": str(cwd or self.folder),
                "environment": environment | ({name: str(value) for name, value in world.items()} if ranks else {}),
                "stdout": str(stdout or own[0]),
                "stderr": str(stderr or own[1]),
            }
            streams += own
            pids.append(self.server.start(request))
        return Running(self.server, pids, argv, cwd or self.folder, streams, environment["JOB_ID"])

    def run(self, *words: object, code: int = 0, **options: object) -> Ended:
        """Run to the end; any other exit code than `code` fails with the command and the end of the log."""
        ended = self.start(*words, **options).wait()
        assert ended.code == code, f"exit code {code} expected\n{ended}"
        return ended

    def refuses(self, line: str, *words: object, code: int = 2, **options: object) -> Ended:
        """Run what must end with this error line, where "..." stands for anything, and write nothing."""
        before = self.names()
        ended = self.run(*words, code=code, **options)
        pattern = ".*".join(map(re.escape, line.split("...")))
        assert re.fullmatch(pattern, ended.error), f"{ended.error}\nexpected: {line}"
        assert self.names() == before, "something was written"
        return ended

    def trained(self, *words: object, **options: object) -> Ended:
        """A run that has ended well, as if it had been done here: it is done once per session."""
        key = repr((words, sorted(options.items())))
        if key not in self.server.trained:
            folder = self.server.folder / f"trained {len(self.server.trained)}"
            ended = Bench(self.server, folder).run(*words, **options)
            self.server.trained[key] = ended
        ended = self.server.trained[key]
        for name in ("output", "results"):
            shutil.copytree(ended.folder / name, self.folder / name)
        return dataclasses.replace(ended, folder=self.folder)

    def reference(self, *words: object, **options: object) -> Ended:
        """The same training, undisturbed, in a folder beside this one."""
        return Bench(self.server, self.folder.parent / "reference").trained(*words, **options)

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
        for process in living:
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()
        psutil.wait_procs(living, LIMIT)
        return left


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


def same_weights(ended: Ended, reference: Ended) -> bool:
    """Whether both have saved the same model, to the last bit."""
    name = "model.safetensors"
    return (ended.output / name).read_bytes() == (reference.output / name).read_bytes()


def same_training(ended: Ended, reference: Ended) -> bool:
    return same_weights(ended, reference) and ended.losses == reference.losses
