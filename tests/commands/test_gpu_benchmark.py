"""Tests of benchmarks/gpu: one item of each kind on the CPU with tiny models, and what makes an item fail.

One test starts benchmarks/training.py, the benchmark of docs/results.md.
"""

import itertools
import json
import re
import subprocess
import sys

import pytest

from gpu_check import rank_rows
from helpers import REPOSITORY, inherited, program

run = program("benchmarks/gpu/run.py")
ITEMS = ["all", "profile-all", "560m-zero2_cpu_offload"]
ITEMS += ["micro-ceilings", "micro-losses", "micro-attention", "micro-gelu", "micro-one_row", "micro-weights"]
ITEMS += ["before-16", "after-16", "zero1-16", "smollm2-360m-4", "ranks-one_rank"]


@pytest.mark.faults
def test_each_kind_of_item_completes_on_the_cpu(tmp_path):
    environment = inherited() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(tmp_path / "hf")}
    words = [sys.executable, str(REPOSITORY / "benchmarks/gpu/run.py"), "--cpu", "--output", "out", "--only", *ITEMS]
    done = subprocess.run(words, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=1200)
    assert done.returncode == 0, done.stdout + done.stderr
    rows = {row["name"]: row for row in map(json.loads, (tmp_path / "out/items.jsonl").read_text().splitlines())}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(ITEMS, "completed")
    assert all(f"| {name} " in (tmp_path / "out/items.md").read_text() for name in rows)
    assert rows["all"]["samples_per_second"] > 0
    assert rows["profile-all"]["profile"][0]["steps"] == 3
    lines = {line["variant"]: line for line in rows["micro-losses"]["lines"]}
    full = lines["full, torch.bfloat16, 96 tokens"]
    assert full["ms"] > 0 and full["loss_error"] < 0.01
    assert len(rows["micro-gelu"]["lines"]) == 2
    before, after = (
        json.loads((tmp_path / f"out/results/{name}.json").read_text())["train"] for name in ("before-16", "after-16")
    )
    assert after["loss_mean"] == pytest.approx(before["loss_mean"], abs=1e-5)
    assert before["padding_tokens"] == 0 < after["padding_tokens"], "only the rows of today are rounded up"


def test_items_have_names_of_their_own_and_the_first_four_minutes_decide():
    """A guard is the longest time of an item. The rows of gpu_check.py exist, so that no item ends at once."""
    names = [item.name for item in run.ITEMS]
    assert len(names) == len({*names})
    first = itertools.takewhile(lambda item: not item.name.endswith("-again"), run.GROUPS["fast2"])
    assert {item.name.split("-")[0] for item in first} == {"before", "after", "compiled", "zero1"}
    rows = {row.name for row in rank_rows(4)}
    assert {row for item in run.GROUPS["ranks"] for row in item.flags.split(" --rows ")[1].split()} <= rows


@pytest.mark.faults
def test_the_benchmark_of_the_cpu_starts_its_children_and_prints_its_table(tmp_path):
    words = [sys.executable, str(REPOSITORY / "benchmarks/training.py")]
    words += ["--model", "tiny", "--repeats", "1", "--rows", "all"]
    done = subprocess.run(words, cwd=tmp_path, env=inherited(), capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"^\| tiny \| 4 x 4 \| all \| \d+\.\d{3} \| ", done.stdout, re.MULTILINE)


@pytest.mark.parametrize(
    ("code", "record", "status"),
    [(0, {}, "completed"), (1, {}, "failed"), (None, {"status": "running"}, "timeout"), (1, {"status": "oom"}, "oom")],
)
def test_an_item_completes_only_with_exit_code_0(code, record, status):
    row = run.judge(code, "error: x: y; z\n", record)
    assert row == {"status": status} | ({} if status == "completed" else {"reason": "error: x: y; z"})
