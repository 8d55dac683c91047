"""Tests of the class at a glance that need no other process: names, columns and the ends of logs."""

import re

import pytest

from helpers import REPOSITORY, bash_blocks
from report_files import write
from reporting.classroom_runs import AFTERNOON, distinct_names, select_experiments
from reporting.trainer_log import END, done_percent, last_error, log_end


def test_the_columns_are_the_experiments_of_the_sheet():
    """A comment such as "two of zero_0, zero_1" names further experiments next to that of the next command."""
    (block,) = [text for _, text in bash_blocks(REPOSITORY / "docs/instructor/sheet.md") if "# Section 11" in text]
    found = set()
    words: list[str] = []
    for line in block.splitlines():
        if line.startswith("#"):
            words = re.findall(r"(?:cpu_offloading/)?zero_\d", line)
            offload = "offload" in line
        elif target := re.search(r"submit\.sh (\S+)", line):
            parent, _, name = target[1].rpartition("/")
            alike = [word for word in words if word.startswith("zero_")] if name.startswith("zero_") else [name]
            found |= {"/".join(filter(None, [parent, word])) for word in alike}
            if offload and name.startswith("zero_"):
                found |= {f"{parent}/cpu_offloading/{word}" for word in alike}
    assert found == set(AFTERNOON)
    assert select_experiments(AFTERNOON) == AFTERNOON, "each column must be an experiment"


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
