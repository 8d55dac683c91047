"""Tests of the class at a glance that need no other process: names, columns and the ends of logs."""

import pytest

from report_files import write
from reporting.classroom_runs import afternoon_experiments, distinct_names, select_experiments
from reporting.trainer_log import END, done_percent, last_error, log_end


def test_the_default_columns_are_the_experiments_of_the_afternoon():
    found = afternoon_experiments()
    assert select_experiments(found) == found, "each column must be an experiment"
    assert {"baseline", "ddp/2_gpus", "deepspeed-single-gpu/zero_3"} <= {*found} and "efficiency/all" not in found


def test_experiments_are_families_or_folders(refusal):
    assert select_experiments(["ddp/2_gpus", "experiments/fsdp-single-gpu/"]) == [
        "ddp/2_gpus",
        *(f"fsdp-single-gpu/{name}" for name in ("activation_checkpointing", "cpu_offload", "full_shard")),
    ]
    assert refusal(select_experiments, ["ddp/2_gpu"]) == (
        "error: --experiments: ddp/2_gpu holds no experiment; did you mean ddp/2_gpus?"
    )


@pytest.mark.parametrize(
    ("folders", "names"),
    [
        (["/home/alice/workshop", "/home/bob/workshop"], ["alice", "bob"]),
        (["/class/a1/x/w", "/class/b/w"], ["a1/x", "b"]),
        (["/class/a", "/class/a/b"], ["a", "b"]),
        (["/home/alice"], ["alice"]),
    ],
)
def test_a_name_is_the_part_of_the_path_that_differs(tmp_path, folders, names):
    assert distinct_names([tmp_path / folder.lstrip("/") for folder in folders]) == names


def test_only_the_end_of_a_log_is_read(tmp_path):
    log = tmp_path / "x_1.out"
    lines = "step 1 of 10 (10 %) after 1 s\nerror: early\n" + "x" * END + "\nstep 7 of 10 (70 %) after 9 s\n"
    write(log, lines)
    assert (done_percent(log_end(log)), last_error(log_end(log))) == (70, "")
    write(log, "error: one line\n")
    assert (done_percent(log_end(log)), last_error(log_end(log))) == (0, "error: one line")
