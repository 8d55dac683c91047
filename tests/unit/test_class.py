"""Tests of the class at a glance that need no other process: its numbers, names, columns and the ends of logs."""

import re

import pytest

import report
from report_files import add_run, write
from reporting.classroom_runs import distinct_names, select_experiments
from reporting.trainer_log import END, done_percent, last_error, log_end


# Counted by hand from experiments/agendas.yaml and the #SBATCH lines, which all say one hour. In an afternoon a pair
# submits 8 jobs with 12 GPUs: section 2 one job of 1 GPU, 6 two jobs of 1 and 2, 9 two of 1, 11 three of 2. The class
# shares 10 jobs with 36 GPUs: section 6 two jobs of 4, 11 three of 4, 6 and 8, 19 five of 2. So 3, 10 and 17 pairs have
# 24, 80 and 136 jobs with 36, 120 and 204 GPUs, and the shared ones. 16 GPUs run them, section by section, in
# 1 + 1 + 1 + 2, 1 + 2 + 2 + 4 and 2 + 4 + 3 + 7 turns, and the shared ones in 3. On 4 GPUs the jobs of 3 pairs take
# 1 + 3 + 2 + 5 turns, and the shared ones 6, without the two jobs of 6 and 8 GPUs.
@pytest.mark.parametrize(
    ("people", "gpus", "needs"),
    [
        ("6 (3 pairs)", 16, "34 | 72 | 8 | 72 | 24"),
        ("6 (3 pairs)", 4, "32 | 58 | 17 | 58 | 19"),
        ("20 (10 pairs)", 16, "90 | 156 | 12 | 156 | 52"),
        ("33 (17 pairs, one of a single person)", 16, "146 | 240 | 19 | 240 | 80"),
    ],
)
def test_the_class_in_numbers(tmp_path, main_of, capsys, monkeypatch, people, gpus, needs):
    monkeypatch.setenv("SBATCH_TIMELIMIT", "00:20:00")
    for job_id, end in (("1", "10:03:01"), ("2", "10:04:32")):
        add_run(tmp_path, "ddp/2_gpus", job_id, finished=f"2026-11-20T{end}+00:00")
    add_run(tmp_path, "ddp/1_gpus", "3", status="failed")
    main_of(report, "--people", people.split()[0], "--gpus", gpus, tmp_path)
    shown = re.sub(" +", " ", capsys.readouterr().out)
    assert shown.startswith(f"People: {people}\nGPUs: {gpus} (") and "\n| 2 baseline | " in shown
    assert f"| All | {needs} |" in shown
    assert "| ddp/2_gpus | 2 | 4.5 (2 runs, AMD EPYC (2 cores), no GPU) |" in shown
    assert "| ddp/1_gpus |" not in shown and f"run: {'23 of 24' if gpus == 16 else '21 of 22'} experiments" in shown


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
