"""Tests of gpu_check.py on a CPU: a row is trained, saved, loaded and scored, and a failed row runs again."""

import json
import os
import signal

import psutil
import pytest

from workbench import Bench, Running, command_line

ROW = "full_shard"
SCRIPT = {"script": "scripts/gpu_check.py", "launcher": "python"}


@pytest.mark.faults
def test_a_row_is_trained_saved_loaded_and_scored(train, workplace):
    first = train("first", "--cpu", "--rows", ROW, "--timeout", 1, **SCRIPT, code=3)
    assert f"{ROW}: failed (error: time: still running after 1 s" in first.log
    second = train("second", "--cpu", "--rows", ROW, **SCRIPT)
    result = json.loads((workplace / "results/gpu_check/gpu_check.json").read_text())["rows"][ROW]
    assert (result["status"], result["precision"]) == ("completed", "fp32")
    assert 7 < result["eval_loss"] < 7.6, "an untrained model has log(2048), which is 7.62"
    assert abs(result["reloaded_loss"] - result["eval_loss"]) < 1e-4
    assert 0 <= result["f1"] <= 100
    text = (workplace / "results/gpu_check/gpu_check.md").read_text()
    assert text.count("| completed |") == 1
    assert text in second.log


@pytest.mark.faults
def test_every_row_of_several_ranks_has_the_loss_and_the_bytes_of_the_estimate(train, workplace):
    """The row `stop` is stopped and resumed, and the row `hang` completes if the log names the frozen rank.

    `make test` runs three rows of 2 ranks in test_preflight_runs.py.
    """
    train("ranks", "--cpu", "--ranks", 2, **SCRIPT)
    results = json.loads((workplace / "results/gpu_check_2_ranks/gpu_check.json").read_text())["rows"]
    assert len(results) >= 25
    assert {row["status"] for row in results.values()} == {"completed"}
    assert abs(results["full_shard"]["held_mib"] / results["one_rank"]["held_mib"] - 0.5) < 0.001
    assert results["hang"]["reason"] == "no answer from rank 1"


def test_no_training_outlives_a_terminated_gpu_check(bench: Bench):
    called = bench.start("--cpu", "--rows", "plain", **SCRIPT)
    trainings = called.until(lambda: find_trainings(called))
    os.kill(called.pids[0], signal.SIGTERM)
    assert called.wait().code == 143
    _, alive = psutil.wait_procs(trainings, timeout=60)
    assert not alive


def find_trainings(called: Running) -> list[psutil.Process]:
    children = psutil.Process(called.pids[0]).children(recursive=True)
    return [child for child in children if "train.py" in command_line(child)]  # a child may just have ended
