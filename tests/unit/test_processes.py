"""Start of the processes from each launcher's variables, and the error line that a job prints once."""

import os
import pickle
import socket
import sys
from pathlib import Path

import pytest

import errors
import hub
from errors import WorkshopError
from parallel import distributed
from parallel.distributed import first_host, prepare_environment


def test_srun_variables_become_ranks(monkeypatch, capsys):
    slurm = {"PROCID": "3", "LOCALID": "1", "JOB_ID": "123456", "STEP_NUM_TASKS": "4"}
    slurm |= {"STEP_TASKS_PER_NODE": "2(x2)", "STEP_NODELIST": "node7"}
    for name, value in slurm.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    prepare_environment(shards=False)
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    assert [os.environ[name] for name in names] == ["3", "1", "4", "2", "node7", "23456"]
    assert capsys.readouterr().out.splitlines() == [
        "Initializing process group for rank 3",
        "MASTER_ADDR: node7",
        "MASTER_PORT: 23456",
    ]


def test_torchrun_variables_are_left_alone(monkeypatch):
    given = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    for name, value in (given | {"SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}).items():
        monkeypatch.setenv(name, value)
    prepare_environment(shards=True)
    assert {name: os.environ[name] for name in given} == given


def test_plain_python_gets_a_world_of_one_only_if_it_shards(capsys):
    prepare_environment(shards=False)
    assert "RANK" not in os.environ
    prepare_environment(shards=True)
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"], os.environ["MASTER_ADDR"]) == ("0", "1", "127.0.0.1")
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", int(os.environ["MASTER_PORT"])))
    assert capsys.readouterr().out == ""


def test_one_task_under_srun_is_no_process_group(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    monkeypatch.setenv("SLURM_PROCID", "0")
    prepare_environment(shards=False)
    assert "RANK" not in os.environ


@pytest.mark.parametrize("text", ["abc", "-1"])
def test_number_of_a_launcher_that_is_none_is_refused(text, monkeypatch, refusal):
    monkeypatch.setenv("WORLD_SIZE", text)
    line = refusal(prepare_environment, False)
    assert line == f"error: WORLD_SIZE: is '{text}', not a whole number; unset it, or give a whole number"


@pytest.mark.parametrize(("nodes", "first"), [("node7", "node7"), ("a1,b2", "a1")])
def test_first_host_of_a_plain_node_list(nodes, first):
    assert first_host(nodes) == first


def test_more_ranks_than_gpus_on_a_node_end_with_3(monkeypatch, refusal):
    monkeypatch.setenv("LOCAL_RANK", "4")
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 4)
    line = refusal(distributed.bind_device, code=3)
    assert line.startswith("error: LOCAL_RANK: 4, but this process sees 4 of the GPUs of ")
    assert "start as many processes per node as it has GPUs, without GPU binding (--gpus-per-task, --gpu-bind)" in line


def bound_task(monkeypatch, **variables: str) -> list[int]:
    """The second of two tasks of a node, each of which sees one GPU; gives what it makes its own."""
    monkeypatch.setattr(distributed.torch.cuda, "device_count", lambda: 1)
    chosen = []
    monkeypatch.setattr(distributed.torch.cuda, "set_device", chosen.append)
    for name, value in ({"LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2"} | variables).items():
        monkeypatch.setenv(name, value)
    return chosen


def test_a_task_that_is_bound_to_one_gpu_of_its_own_takes_that(monkeypatch):
    chosen = bound_task(monkeypatch, SLURM_GPUS_ON_NODE="2")
    distributed.bind_device()
    assert chosen == [0]
    assert os.environ["LOCAL_RANK"] == "0", "DeepSpeed computes on cuda:LOCAL_RANK"


@pytest.mark.parametrize(
    "variables",
    [{}, {"SLURM_GPUS_ON_NODE": "1"}, {"SLURM_GPUS_ON_NODE": "2", "TORCHELASTIC_RUN_ID": "1"}],
    ids=["no Slurm", "one GPU for two tasks", "ranks of one torchrun"],
)
def test_two_ranks_do_not_take_the_same_gpu(monkeypatch, refusal, variables):
    chosen = bound_task(monkeypatch, **variables)
    assert "without GPU binding" in refusal(distributed.bind_device, code=3)
    assert chosen == []


@pytest.mark.parametrize("variable", ["RANK", "SLURM_PROCID"])
def test_other_ranks_leave_the_error_line_to_rank_0(variable, monkeypatch, capsys):
    waited = []
    monkeypatch.setattr(errors.time, "sleep", waited.append)
    monkeypatch.setenv(variable, "0")
    errors.report(WorkshopError("--x", "is wrong", "correct it"))
    assert waited == []
    monkeypatch.setenv(variable, "1")
    errors.report(WorkshopError("--x", "is wrong", "correct it"))
    assert waited == [10]
    assert capsys.readouterr().err == 2 * "error: --x: is wrong; correct it\n"


def test_error_of_several_lines_is_printed_as_one():
    assert str(WorkshopError("a\nb", "c\nd", "\x1b[2J")) == "a b: c d;  [2J"


def test_an_error_line_on_a_terminal_does_not_stand_behind_a_progress_bar(monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    errors.report(WorkshopError("--x", "is wrong", "correct it"))
    assert capsys.readouterr().err == "\r\033[Kerror: --x: is wrong; correct it\n"


@pytest.mark.parametrize("terminal", [True, False])
def test_libraries_draw_bars_on_a_terminal_only(terminal, monkeypatch):
    switched = []
    monkeypatch.setattr(sys.stderr, "isatty", lambda: terminal, raising=False)
    monkeypatch.setattr(hub.datasets, "disable_progress_bars", lambda: switched.append("datasets"))
    monkeypatch.setattr(hub.logging, "disable_progress_bar", lambda: switched.append("transformers"))
    hub.draw_bars_on_terminals_only()
    assert switched == ([] if terminal else ["datasets", "transformers"])


def test_an_error_of_another_process_arrives_whole():
    """A pool's worker sends it as pickle makes it."""
    error = pickle.loads(pickle.dumps(WorkshopError(Path("a.json"), "is wrong", "correct it", 3)))
    assert (str(error), error.code) == ("a.json: is wrong; correct it", 3)


def test_a_program_ends_with_the_errors_line_and_code(capsys):
    def main():
        raise WorkshopError("--x", "is wrong", "correct it", errors.NO_CHECKPOINT)

    with pytest.raises(SystemExit) as ended:
        errors.run_program(main)
    assert ended.value.code == 4
    assert capsys.readouterr().err == "error: --x: is wrong; correct it\n"


def no_memory():
    raise distributed.torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB.")


def no_memory_in_nccl():
    raise distributed.dist.DistBackendError(
        "ncclUnhandledCudaError: Call to CUDA function failed.\nCuda failure 2 'out of memory'"
    )


@pytest.mark.parametrize(
    ("main", "code", "printed"),
    [
        (lambda: sys.exit(7), 7, ""),
        (lambda: sys.exit(), 0, ""),
        (no_memory, 1, "error: memory: CUDA out of memory; lower "),
        (no_memory_in_nccl, 1, "error: memory: Cuda failure 2 'out of memory'; lower "),
    ],
    ids=["exit code", "exit without a code", "no memory", "of NCCL"],
)
def test_a_script_of_ranks_has_the_exit_code_of_its_end(main, code, printed, capsys):
    """As processes, with other ends: tests/commands/test_exit_codes.py."""
    assert distributed.run_and_report(main) == code
    assert printed in capsys.readouterr().err
