"""Tests of benchmarks/gpu: one item of each kind on the CPU with tiny models, and what makes an item fail."""

import json
import math
import subprocess
import sys

import pytest

from helpers import REPOSITORY, inherited, program

run = program("benchmarks/gpu/run.py")
# The comparisons add one-rank and one-rank-none
ITEMS = ["all", "profile-all", "560m-zero2_cpu_offload", "resume-plain", "2r-probe", "2r-ddp", "4r-hybrid_shard_2x2"]
ITEMS += ["micro-ceilings", "micro-losses", "micro-attention", "micro-gelu"]


@pytest.fixture(scope="module")
def rows(tmp_path_factory) -> dict[str, dict]:
    """The rows of the items by name."""
    folder = tmp_path_factory.mktemp("gpu benchmark")
    environment = inherited() | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": "", "HF_HOME": str(folder / "hf")}
    words = [sys.executable, str(REPOSITORY / "benchmarks/gpu/run.py"), "--cpu", "--output", "out", "--only", *ITEMS]
    done = subprocess.run(words, cwd=folder, env=environment, capture_output=True, text=True, timeout=1200)
    lines = (folder / "out/items.jsonl").read_text().splitlines()
    found = {row["name"]: row for row in map(json.loads, lines)}
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(f"| {name} " in (folder / "out/items.md").read_text() for name in found)
    return found


def test_each_kind_of_item_completes_on_the_cpu(rows):
    assert rows.keys() == {*ITEMS, "one-rank"}
    assert {name: row["status"] for name, row in rows.items()} == dict.fromkeys(rows, "completed")
    assert rows["all"]["samples_per_second"] > 0
    assert rows["profile-all"]["profile"][0]["steps"] == 3


def test_ranks_have_the_loss_of_one_rank_and_no_speed(rows):
    for name in ("2r-ddp", "4r-hybrid_shard_2x2"):
        assert rows[name]["loss_difference"] < run.TOLERANCE
        assert rows[name]["samples_per_second"] is None
        assert len(rows[name]["held"]) == rows[name]["ranks"]
    assert rows["one-rank"]["samples_per_second"] > 0
    assert set(rows["2r-probe"]["lines"][0]["right"].values()) == {True}


def test_measurements_print_their_variants(rows):
    lines = {line["variant"]: line for line in rows["micro-losses"]["lines"]}
    full = lines["full, torch.bfloat16, 96 tokens"]
    assert full["ms"] > 0 and full["loss_error"] < 0.01
    assert len(rows["micro-gelu"]["lines"]) == 2


@pytest.mark.parametrize(
    ("codes", "record", "status"),
    [
        ([0, 0], {}, "completed"),
        ([0, 1], {}, "failed"),
        ([1, None], {"status": "failed"}, "failed"),
        ([0, None], {"status": "running"}, "timeout"),
        ([1], {"status": "oom"}, "oom"),
    ],
)
def test_an_item_completes_only_if_all_its_ranks_do(codes, record, status):
    row = run.judge(codes, "error: x: y; z\n", record)
    assert row == {"status": status} | ({} if status == "completed" else {"reason": "error: x: y; z"})


def test_an_item_starts_again_if_its_port_was_taken(monkeypatch, tmp_path):
    session = run.Session(tmp_path, cpu=True, fork=False, transport="hostid")
    codes = iter([[1, 1], [0, 0]])
    monkeypatch.setattr(run, "wait", lambda processes, seconds: next(codes))
    monkeypatch.setattr(session, "start", lambda item, job: (tmp_path / f"{job}.log").write_text("code: EADDRINUSE"))
    assert session.measure(run.Item("2r-ddp", ranks=2), 1)["status"] == "completed"


@pytest.mark.parametrize(("loss", "fails"), [(7.0005, False), (7.001, True), (None, True)])
def test_an_item_fails_if_its_loss_differs(loss, fails):
    compared = run.compare_losses({"eval_loss": loss}, "one-rank", {"eval_loss": 7.0})
    assert (compared.get("status") == "failed") is fails
    assert math.isinf(compared["loss_difference"]) is (loss is None)
    assert run.compare_losses({"eval_loss": loss}, "one-rank", {}) == {}


@pytest.mark.parametrize(
    ("codes", "losses", "weights", "reason"),
    [
        ([0, 75, 0], [6.0, 5.0], {"a": "1"}, None),
        ([0, 0, 0], [6.0, 5.0], {"a": "1"}, "exit codes"),
        ([0, 75, 0], [6.0, 5.1], {"a": "1"}, "losses"),
        ([0, 75, 0], [6.0, 5.0], {"a": "2"}, "weights"),
        ([0, 75, 0], [6.0, 5.0], {}, "weights"),
    ],
)
def test_a_resumed_training_must_equal_the_whole_one(codes, losses, weights, reason):
    whole, resumed = ({"eval": [{"loss": loss} for loss in each]} for each in ([6.0, 5.0], losses))
    row = run.compare_resumed(codes, (whole, {"a": "1"}), (resumed, weights))
    assert row["status"] == ("failed" if reason else "completed")
    assert (reason or "") in row.get("reason", "")
