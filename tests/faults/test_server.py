"""Tests that a forked run equals the same run as a command, in exit code, output, record and files."""

import psutil
import pytest
from safetensors.torch import load_file

from helpers import Finished, until
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


def run(bench: Bench, name: str, launcher: str) -> Finished:
    how = RUNS[name]
    script = bench.patched(how["patch"]).name if "patch" in how else "scripts/train.py"
    return bench.run(*how["words"], code=how["code"], script=script, launcher=launcher)


@pytest.mark.parametrize("name", RUNS)
def test_a_forked_run_equals_the_command(name, server, tmp_path):
    benches = [Bench(server, tmp_path / kind / "work") for kind in ("forked", "command")]
    forked, command = (run(bench, name, how) for bench, how in zip(benches, ("", "python"), strict=True))
    assert forked.error_lines == command.error_lines
    assert benches[0].names() == benches[1].names()
    if forked.record_path.exists():
        assert forked.record["knobs"] == command.record["knobs"]
        assert forked.losses == command.losses
    for path in forked.output.glob("*.safetensors"):
        ours, theirs = load_file(path), load_file(command.output / path.name)
        assert ours.keys() == theirs.keys()
        assert all(ours[weight].equal(theirs[weight]) for weight in ours)


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
