"""Run a command of a job on this node with two memory loggers next to it, and pass signals on to the command.

    srun ... python -P scripts/job/on_node.py COMMAND...     # run_job.py starts this in each task of a job step

Without srun (python or torchrun on one node), run_job.py calls `run` itself. The exit code is the command's, or 128 + N
if signal N ended the command. This module imports only the standard library, because each node of a job waits for its
imports.
"""

import contextlib
import ctypes
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
PR_SET_PDEATHSIG = 1  # from linux/prctl.h
GPU_COLUMNS = "timestamp,index,name,memory.used,memory.total,power.draw,utilization.gpu"
SECONDS_FOR_LOGGER = 5  # to end after SIGTERM


def main() -> None:
    end_program(run(Command(), sys.argv[1:]))


def python_command(*words: object) -> list[str]:
    """Return a command that starts Python with these words, in the site's container if it has one."""
    return [*shlex.split(os.environ.get("CONTAINER", "")), "python", *map(str, words)]


def end_program(code: int) -> NoReturn:
    """End with this exit code. Python restores the default handlers first, and a late signal would replace the code."""
    ignore(*SIGNALS)
    sys.exit(code)


class Command:
    """A command that gets the signals of this process.

    signals: names of those that this process has received, such as USR1. on_signal is called after each of them.
    """

    def __init__(self, signals: list[str] | None = None, on_signal: Callable[[], None] = lambda: None):
        self.signals = signals or []
        self.on_signal = on_signal
        self.process: subprocess.Popen | None = None
        handle_signals(self.receive)

    def receive(self, number: int, frame: object) -> None:
        self.signals.append(signal.Signals(number).name.removeprefix("SIG"))
        # All but USR1 become TERM: SIGHUP has another meaning for srun, the command ignores SIGINT, and a training run
        # treats USR2 and TERM alike
        if self.process:
            self.process.send_signal(number if number == signal.SIGUSR1 else signal.SIGTERM)
        self.on_signal()

    def start(self, words: list[str], **variables: str) -> int:
        """Start the command with these additional variables, and return its process id."""
        self.process = subprocess.Popen(words, env=os.environ | variables, preexec_fn=prepare_command)
        if self.signals:  # they came before there was a process, or during the bandwidth test
            self.process.terminate()
        return self.process.pid

    def wait(self) -> int:
        """Wait for the end of the command, and return its exit code as a shell reports it."""
        assert self.process
        code = self.process.wait()
        self.process = None
        return code if code >= 0 else 128 - code


def end_with_parent() -> None:
    """Let the kernel send SIGTERM to this process when its parent ends, even by SIGKILL."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGTERM)


def handle_signals(handler: Callable[[int, Any], object]) -> None:
    """Install a handler for all signals that stop a job. But keep SIGHUP ignored, as it is under nohup.

    Do not keep SIGINT ignored: a process that a script starts in the background ignores it.
    """
    for number in SIGNALS:
        if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, handler)


def ignore(*numbers: int) -> None:
    for number in numbers:
        signal.signal(number, signal.SIG_IGN)


def prepare_command() -> None:
    """Let a new process end with its parent, and ignore the Ctrl-C of a terminal, which the parent passes on."""
    end_with_parent()
    ignore(signal.SIGINT)


def run(command: Command, words: list[str]) -> int:
    """Run a command and the loggers of this node, and return the command's exit code."""
    host = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    task = os.environ.get("SLURM_PROCID", "0")
    role = f"launcher {task}" if any(word.endswith("scripts/launch.py") for word in words) else f"rank {task}"
    variables = {"PET_NODE_RANK": os.environ.get("SLURM_NODEID", "0")}  # torchrun's --node-rank
    if os.environ["NODES"] != "1" and not os.environ.get("GLOO_SOCKET_IFNAME"):
        variables |= gloo_interface()
    pid = command.start(words, **variables)
    loggers: dict[str, subprocess.Popen] = {}
    try:
        start_loggers(loggers, pid, host)
    except OSError as error:  # for example a full disk, which must not end the training
        note(f"missing_{host}", f"memory logs on {host} ({error})")
    code = command.wait()
    if code:  # srun returns the highest code of all nodes, which often comes from a command that srun ended
        note("exit_codes", f"{time.time_ns()} {code} {role} on {host}")
    for name, logger in loggers.items():
        # psrecord may end together with the command
        if (ended := logger.poll()) is not None and not command.signals and (name, ended) != ("psrecord", 0):
            note(f"missing_{host}", f"{name} on {host} ended before the training: its log is not complete")
        logger.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            logger.wait(SECONDS_FOR_LOGGER)
    return code


def start_loggers(loggers: dict[str, subprocess.Popen], pid: int, host: str) -> None:
    """Start psrecord and nvidia-smi next to the command, in the first task of a node. Note a logger that is missing.

    Add each to `loggers` as soon as it runs. Raises OSError.
    """
    if os.environ["LOGGERS"] != "yes" or os.environ.get("SLURM_LOCALID", "0") != "0":
        return
    name = f"memory_log_{os.environ['JOB_ID']}" + ("" if os.environ["ALLOCATED_NODES"] == "1" else f"_{host}")
    cpu_log, gpu_log = f"cpu_memory/cpu_{name}.txt", f"gpu_memory/gpu_{name}.csv"
    interval = os.environ["LOG_INTERVAL"]
    if is_installed("psrecord", cpu_log, host):
        # If srun has started several tasks on this node, log all of them through their parent slurmstepd
        several = int(os.environ.get("SLURM_STEP_NUM_TASKS", "1")) > int(os.environ["NODES"])
        process = str(os.getppid() if several else pid)
        # psrecord itself would overwrite the log of an earlier attempt. `cat` ends after psrecord
        source, pipe = os.pipe()
        start_logger(["cat"], cpu_log, stdin=source)
        words = ["psrecord", process, "--include-children", "--interval", interval, "--log", f"/dev/fd/{pipe}"]
        loggers["psrecord"] = start_logger(words, os.devnull, pass_fds=[pipe])
        os.close(source)
        os.close(pipe)
    if is_installed("nvidia-smi", gpu_log, host) and (gpus := choose_gpus(host)) is not None:
        words = ["nvidia-smi", *gpus, f"--query-gpu={GPU_COLUMNS}", "--format=csv,nounits", "-l", interval]
        loggers["nvidia-smi"] = start_logger(words, gpu_log)


def is_installed(program: str, log: str, host: str) -> bool:
    installed = shutil.which(program) is not None
    if not installed:
        note(f"missing_{host}", f"{program} is not installed on {host}: no {log}")
    return installed


def start_logger(words: list[str], log: str, **options: Any) -> subprocess.Popen:
    """Start a logger that appends to a file. Only SIGTERM ends it: Slurm may send other signals to the whole job."""

    def prepare() -> None:
        end_with_parent()
        ignore(*SIGNALS if words == ["cat"] else SIGNALS[1:])

    with open(log, "ab") as file:
        return subprocess.Popen(words, stdout=file, stderr=subprocess.DEVNULL, preexec_fn=prepare, **options)


def choose_gpus(host: str) -> list[str] | None:
    """Return flags for nvidia-smi, which also shows the GPUs of other jobs. None if the job sees no GPU."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES", "unset")
    if visible in ("", "-1", "NoDevFiles"):
        problem = f"CUDA_VISIBLE_DEVICES is '{visible}' on {host}, the job sees no GPU: no log of GPU memory"
        note(f"missing_{host}", problem)
        return None
    if visible == "unset" or "MIG" in visible:
        problem = f"CUDA_VISIBLE_DEVICES is {visible} on {host}: the GPU log holds all GPUs that nvidia-smi shows"
        note(f"missing_{host}", problem)
        return []
    return ["-i", ",".join(visible.split(",")[: int(os.environ["RANKS_PER_NODE"])])]


def gloo_interface() -> dict[str, str]:
    """Name the interface if this node's own name means 127.0.1.1, where gloo would listen otherwise."""
    if not output("getent", "hosts", socket.gethostname()).startswith("127."):
        return {}
    address = os.environ["MASTER_ADDR"]
    own = [line.split()[1] for line in output("ip", "-o", "address").splitlines() if f" {address}/" in line]
    routes = re.findall(r" dev (\S+)", output("ip", "-o", "route", "get", address))  # on the other nodes
    return {"GLOO_SOCKET_IFNAME": [*own, *routes][0]} if own or routes else {}


def output(*words: str, seconds: float = 5) -> str:
    """Return the output of a command. It is empty if the command is not installed or takes too long."""
    try:
        return subprocess.run(words, capture_output=True, text=True, errors="replace", timeout=seconds).stdout
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return ""


def note(name: str, line: str) -> None:
    """Append a line for the end of the job to a file in the attempt's folder. On a full disk the line is lost."""
    with contextlib.suppress(OSError), Path(os.environ["RUN_DIR"], name).open("a") as file:
        file.write(f"{line}\n")


if __name__ == "__main__":
    main()
