"""Tests that a forked run equals the same run as a command, in exit code, output, record and files."""

import json
import os
import re
import signal
import socket

import psutil
import pytest
from safetensors.torch import load_file

from helpers import LIMIT, Finished, until
from workbench import Bench, command_line

# End the run with SIGTERM at the beginning of the third step
TERM = """
from training.callbacks import MeasureCallback
def end(self, args, state, control, **kwargs):
    if state.global_step == 2:
        os.kill(os.getpid(), signal.SIGTERM)
MeasureCallback.on_step_begin = end
"""
RUNS = {
    "input error": {"words": ("--train_size", 9999), "code": 2},
    "training": {"words": (), "code": 0},
    "one rank of FSDP": {"words": ("--fsdp",), "code": 0},
    "SIGTERM": {"words": ("--max_steps", 4), "code": 75, "patch": TERM},
}
# Fields about time, memory and the process, which differ between two runs
VARIES = re.compile(
    r"started|finished|pid|.*(runtime|per_second|loss_time|_MB|util_%|peak_process|warm_up|mfu|matmul_peak|estimate).*"
)


def content(value: object) -> object:
    """A record without the fields that differ between two equal runs."""
    if isinstance(value, dict):
        return {key: content(each) for key, each in value.items() if not VARIES.fullmatch(key)}
    return [content(each) for each in value] if isinstance(value, list) else value


def stable_lines(text: str) -> list[str]:
    """The lines of the output without measured numbers, progress bars and warnings."""
    lines = [line for line in text.splitlines() if not re.search(r"\d+%\||Warning|warn", line)]
    return [re.sub(r"'(eval|train)_(runtime|\w+_per_second)': '[^']*'|after \d+ s", "measured", line) for line in lines]


def run(bench: Bench, name: str, launcher: str) -> Finished:
    how = RUNS[name]
    script = bench.patched(how["patch"]).name if "patch" in how else "scripts/train.py"
    return bench.run(*how["words"], code=how["code"], script=script, launcher=launcher)


@pytest.mark.parametrize("name", RUNS)
def test_a_forked_run_equals_the_command(name, server, tmp_path):
    benches = [Bench(server, tmp_path / kind / "work") for kind in ("forked", "command")]
    forked, command = (run(bench, name, how) for bench, how in zip(benches, ("", "python"), strict=True))
    assert forked.error_lines == command.error_lines
    assert stable_lines(forked.out) == stable_lines(command.out)
    assert benches[0].names() == benches[1].names()
    if forked.record_path.exists():
        assert content(forked.record) == content(command.record)
    for path in forked.output.glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(command.output / path.name)
        assert ours.keys() == theirs.keys()
        assert all(ours[weight].equal(theirs[weight]) for weight in ours)


LOOK = """
import json, os, signal, sys, threading
lists = {number.name: str(signal.getsignal(number)).split(" at ")[0] for number in signal.valid_signals()
         if isinstance(number, signal.Signals)}
print(json.dumps({
    "signals": lists, "blocked": sorted(signal.pthread_sigmask(signal.SIG_BLOCK, [])), "name": __name__,
    "leader": os.getpgid(0) == os.getpid() == os.getsid(0), "threads": [t.name for t in threading.enumerate()],
    "argv": sys.argv, "path": sys.path[0], "here": os.getcwd(), "environment": dict(os.environ),
    "files": sorted(os.listdir("/proc/self/fd"), key=int)[:3], "open": len(os.listdir("/proc/self/fd")),
    "buffered": [sys.stdout.line_buffering, sys.stderr.line_buffering], "umask": os.umask(0),
    "wakeup": signal.set_wakeup_fd(-1),
}))
"""


def test_a_forked_process_has_the_state_of_a_new_one(bench):
    bench.write("folder/look.py", LOOK)
    forked, command = (bench.run("a", "b c", script="folder/look.py", launcher=how, X="1") for how in ("", "python"))
    found, expected = json.loads(forked.out), json.loads(command.out)
    # The interpreter sets LC_CTYPE for programs that it starts, if the locale is C
    expected["environment"].pop("LC_CTYPE", None)
    found["environment"].pop("LC_CTYPE", None)
    assert found == expected


def test_processes_left_by_a_case_are_killed(server, tmp_path):
    """Even a process that has left its group, its session and its parents is killed."""
    bench = Bench(server, tmp_path / "work")
    ended = bench.run("-c", "(setsid setsid sleep 1000 &) && echo started", script="bash")
    assert ended.out == "started\n"
    until(lambda: [process for process in server.living() if command_line(process) == "sleep 1000"])
    (left,) = bench.close(seconds=0)
    pid, command = left.split(maxsplit=1)
    assert command == "sleep 1000" and not psutil.pid_exists(int(pid))
    assert not bench.close(seconds=0)


def test_a_reused_process_id_is_a_new_process(server):
    """The earlier process of this id ended with another exit code."""
    near, far = socket.socketpair()
    before, server.channel = server.channel, near
    try:
        server.codes[123456789] = 2
        far.sendall(b'{"pid": 123456789}\n')
        assert server.answer("pid", LIMIT) == 123456789
        assert server.wait(123456789, 0) is None
        far.sendall(b'{"pid": 123456789}\n{"ended": 123456789, "code": 0}\n')
        server.answer("ended", LIMIT)
        assert server.wait(123456789, 0) == 0
    finally:
        server.channel = before
        server.codes.pop(123456789, None)
        near.close()
        far.close()


def test_a_killed_process_has_the_code_of_its_signal(bench):
    bench.write("wait.py", "import signal\nprint('here', flush=True)\nsignal.pause()\n")
    started = bench.start(script="wait.py")
    started.until(lambda: started.out)
    os.kill(started.pids[0], signal.SIGKILL)
    assert started.wait().code == -signal.SIGKILL
