"""A process that has imported PyTorch, transformers and train.py once, and forks for each run: a second, not ten.

    python tests/server.py FD      # `bench.Server` does this; FD: its end of a socket

A request is a line of JSON, a `Request`. So are the answers: {"pid": n} when the process was forked, and when it has
ended {"ended": n, "code": c}, c < 0 for a signal, as subprocess counts.

A forked process is what `python scripts/train.py` would be: its own session, signals, variables, folder and files; the
script runs as __main__ at the top of the program, so that the interpreter shuts down as usual; and nothing but the main
thread was there to fork (`alone`). One difference cannot be helped: what a library reads from a variable when it is
imported (`READ_AT_IMPORT`) is the server's. A test that sets such a variable runs as a command of its own.
"""

import ctypes
import gc
import importlib
import json
import os
import runpy
import select
import signal
import socket
import sys
from pathlib import Path
from typing import NoReturn, TypedDict

import psutil

SCRIPTS = Path(__file__).resolve().parent.parent / "scripts"
PR_SET_CHILD_SUBREAPER = 36
# of jemalloc, which comes with pyarrow; it stops the thread before a fork and starts it behind it
KNOWN_THREADS = {"jemalloc_bg_thd"}
# of pip's tracking in a sandbox such as conda, PYTHON... of the interpreter, the others of libraries
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OMP_", "MKL_", "CUDA_", "PYTHON", "LANG", "LC_", "HOME")


class Request(TypedDict):
    """argv: script and arguments, or a whole command if `fork` is false. stdout, stderr: paths."""

    fork: bool
    argv: list[str]
    cwd: str
    environment: dict[str, str]
    stdout: str
    stderr: str


def preload() -> None:
    """Import what the scripts import, as they do: their folder first on the path."""
    sys.path[0] = str(SCRIPTS)
    before = dict(os.environ)
    importlib.import_module("distributed.process_group").prepare_deepspeed()
    for name in ("deepspeed", "train", "evaluate", "transformers.models.bloom.modeling_bloom"):
        importlib.import_module(name)
    os.environ.clear()
    os.environ.update(before)
    gc.collect()
    gc.freeze()  # the children's collector, and their end, would touch and so copy all that was imported


def alone() -> None:
    """A fork has only the thread that called it: another one's locks would stay locked for ever in the child."""
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    others = [name for name in threads if name not in KNOWN_THREADS]
    assert len(others) == 1, f"threads that do not survive a fork: {threads}"


def serve(channel: socket.socket) -> Request:
    """Fork for each request. Returns in the child alone; this process ends with its client."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # orphans of a run become children here, and are found
    woken, wake = socket.socketpair()
    wake.setblocking(False)
    signal.set_wakeup_fd(wake.fileno())
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests = channel.makefile("rb")
    send(channel, {"ready": os.getpid()})
    while True:
        readable, _, _ = select.select([channel, woken], [], [])
        if woken in readable:
            woken.recv(4096)
            for pid, code in ended():
                send(channel, {"ended": pid, "code": code})
        if channel in readable:
            line = requests.readline()
            if not line:
                leave()
            alone()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (channel, woken, wake):
                    each.close()
                return json.loads(line)
            send(channel, {"pid": pid})


def send(channel: socket.socket, answer: dict) -> None:
    channel.sendall(json.dumps(answer).encode() + b"\n")


def ended() -> list[tuple[int, int]]:
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def leave() -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(0)


def become(request: Request) -> None:
    """Make this process the one that the request describes."""
    os.setsid()
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    writing = os.O_WRONLY | os.O_CREAT | os.O_APPEND
    streams = [(os.devnull, os.O_RDONLY), (request["stdout"], writing), (request["stderr"], writing)]
    for number, (path, flags) in enumerate(streams):
        opened = os.open(path, flags, 0o644)
        os.dup2(opened, number)
        os.close(opened)
    os.environ.clear()
    os.environ.update(request["environment"])
    if not request["fork"]:
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # which Python ignores, and a new program would inherit
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = str((Path(request["cwd"]) / request["argv"][0]).resolve().parent)


if __name__ == "__main__":
    preload()
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    become(wanted)
    runpy.run_path(sys.argv[0], run_name="__main__")
