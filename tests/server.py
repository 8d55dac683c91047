"""Import PyTorch, transformers and train.py once, and fork for each run, which then starts in one second, not ten.

    python tests/server.py FD      # `workbench.Server` does this; FD: the server's end of a socket

A request is one line of JSON, a `Request`. The answers are lines of JSON too: {"pid": n} after the fork, and
{"ended": n, "code": c} after the end of the process. As in subprocess, c is negative for a signal.

A forked process equals `python scripts/train.py`. It has its own session, signals, variables, folder and files. The
script runs as __main__ at the top of the program, so the interpreter shuts down as usual. Only the main thread exists
at the fork (`check_single_thread`). Two differences remain. Variables that a library reads at import (`READ_AT_IMPORT`)
have the server's values; `Bench.start` starts a run that changes such a variable as a command. And a run measures the
peak of matrix products for a moment only, which no test compares: it takes a second, and ten in fp16.
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
# A thread of jemalloc, a library in pyarrow. jemalloc stops this thread before a fork and restarts it afterwards.
KNOWN_THREADS = {"jemalloc_bg_thd"}
# Prefixes of variables that the interpreter or a library reads when it starts or is imported
READ_AT_IMPORT = ("HF_", "HUGGINGFACE_", "TRANSFORMERS_", "OMP_", "MKL_", "CUDA_", "PYTHON", "LANG", "LC_", "HOME")

PRELOADED = ("deepspeed", "train", "evaluate", "transformers.models.bloom.modeling_bloom")
# Each of these would take a run a part of a second, because a library imports it only when it needs it
PRELOADED += ("torch.utils.benchmark", "deepspeed.runtime.zero.muon.muon_optimizer", "transformers.conversion_mapping")


class Request(TypedDict):
    """A process to start. argv: script and arguments, or a full command if `fork` is false. stdout, stderr: paths."""

    fork: bool
    argv: list[str]
    cwd: str
    environment: dict[str, str]
    stdout: str
    stderr: str


def preload() -> None:
    """Import the modules that the scripts import, with the scripts' folder first on the path as in a script."""
    sys.path[0] = str(SCRIPTS)
    before = dict(os.environ)
    importlib.import_module("distributed.process_group").prepare_deepspeed()
    for name in PRELOADED:
        importlib.import_module(name)
    # The first call takes half a second
    sys.modules["transformers.conversion_mapping"].get_checkpoint_conversion_mapping("bloom")
    sys.modules["measure.flops"].SECONDS = 0.01
    sys.modules["measure.flops"].CPU_SIZE = 256
    os.environ.clear()
    os.environ.update(before)
    gc.collect()
    gc.freeze()  # otherwise garbage collection in a child touches, and so copies, the memory of all imports


def check_single_thread() -> None:
    """Fail if there is a second thread: a fork does not copy it, and its locks would stay locked in the child."""
    threads = [Path(f"/proc/self/task/{task}/comm").read_text().strip() for task in os.listdir("/proc/self/task")]
    others = [name for name in threads if name not in KNOWN_THREADS]
    assert len(others) == 1, f"threads that do not survive a fork: {threads}"


def serve(channel: socket.socket) -> Request:
    """Fork for each request. Only the child returns; this process ends when its client closes the channel."""
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)  # adopt the orphans of a run, so that they can be found
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
            for pid, code in reap_children():
                send(channel, {"ended": pid, "code": code})
        if channel in readable:
            line = requests.readline()
            if not line:
                kill_children_and_exit()
            check_single_thread()
            pid = os.fork()
            if pid == 0:
                signal.set_wakeup_fd(-1)
                for each in (channel, woken, wake):
                    each.close()
                return json.loads(line)
            send(channel, {"pid": pid})


def send(channel: socket.socket, answer: dict) -> None:
    channel.sendall(json.dumps(answer).encode() + b"\n")


def reap_children() -> list[tuple[int, int]]:
    """Return the process id and exit code of each child that has ended."""
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


def kill_children_and_exit() -> NoReturn:
    for process in psutil.Process().children(recursive=True):
        process.kill()
    os._exit(0)


def prepare_process(request: Request) -> None:
    """Give this process the session, signals, files and variables of the request, or exec its command."""
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
        for number in (signal.SIGPIPE, signal.SIGXFSZ):  # a new program would ignore these, as Python does
            signal.signal(number, signal.SIG_DFL)
        os.execvpe(request["argv"][0], request["argv"], request["environment"])
    sys.argv = request["argv"]
    sys.path[0] = str((Path(request["cwd"]) / request["argv"][0]).resolve().parent)


if __name__ == "__main__":
    preload()
    wanted = serve(socket.socket(fileno=int(sys.argv[1])))
    prepare_process(wanted)
    runpy.run_path(sys.argv[0], run_name="__main__")
