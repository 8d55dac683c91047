"""Tests of gpu_check.py on a CPU: a row is trained, saved, loaded and scored, and a failed row runs again."""

import json
import os
import signal

import psutil

from workbench import Bench, Running

ROW = "full_shard"
SCRIPT = {"script": "scripts/gpu_check.py", "launcher": "python"}


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


def test_no_training_outlives_a_terminated_gpu_check(bench: Bench):
    called = bench.start("--cpu", "--rows", "plain", **SCRIPT)
    trainings = called.until(lambda: find_trainings(called))
    os.kill(called.pids[0], signal.SIGTERM)
    assert called.wait().code == 143
    _, alive = psutil.wait_procs(trainings, timeout=60)
    assert not alive


def find_trainings(called: Running) -> list[psutil.Process]:
    children = psutil.Process(called.pids[0]).children(recursive=True)
    return [child for child in children if any("train.py" in word for word in child.cmdline())]
