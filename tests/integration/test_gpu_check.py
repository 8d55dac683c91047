"""gpu_check.py with the rows of a CPU: trained, saved, loaded again and scored; what failed is run again."""

import json
import subprocess
import sys
import time

import psutil

from helpers import REPOSITORY, environment

ROWS = ("full_shard", "ddp", "zero3_cpu_offload")


def gpu_check(folder, *words: str) -> subprocess.CompletedProcess:
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--cpu", *words]
    variables = environment({"TRAIN_SIZE": "9999", "HF_HOME": str(folder / "hf")})  # a knob that reaches no row
    return subprocess.run(command, cwd=folder, env=variables, capture_output=True, text=True, timeout=900)


def test_rows_are_trained_saved_loaded_and_scored(tmp_path):
    first = gpu_check(tmp_path, "--rows", *ROWS, "--timeout", "1")
    assert first.returncode == 3, first.stderr
    assert first.stdout.count("failed (error: time: still running after 1 s") == len(ROWS)
    second = gpu_check(tmp_path, "--rows", *ROWS)
    assert second.returncode == 0, second.stdout + second.stderr
    content = json.loads((tmp_path / "results/gpu_check/gpu_check.json").read_text())
    assert list(content["rows"]) == list(ROWS)
    for result in content["rows"].values():
        assert result["status"] == "completed"
        assert result["precision"] == "fp32"
        assert 7 < result["reloaded_loss"] < 7.7, "log(2048) is 7.62, what an untrained model has"
        assert abs(result["reloaded_loss"] - result["eval_loss"]) < 1e-4
    assert 0 <= content["rows"]["full_shard"]["exact_match"] <= content["rows"]["full_shard"]["f1"] <= 100
    losses = [result["eval_loss"] for result in content["rows"].values()]
    assert max(losses) - min(losses) < 1e-3, "one rank, the same training"
    text = (tmp_path / "results/gpu_check/gpu_check.md").read_text()
    assert text.count("| completed |") == len(ROWS)
    assert text.split("\n\n")[1] in second.stdout
    third = gpu_check(tmp_path, "--rows", *ROWS)
    assert third.returncode == 0
    assert "completed, " not in third.stdout, "nothing was left to do"


def test_a_call_that_is_ended_leaves_no_training(tmp_path):
    command = [sys.executable, str(REPOSITORY / "scripts" / "gpu_check.py"), "--cpu", "--rows", "plain"]
    with (tmp_path / "log").open("w") as log:
        started = psutil.Popen(command, cwd=tmp_path, env=environment({}), stdout=log, stderr=log)
    deadline = time.monotonic() + 300
    trainings: list[psutil.Process] = []
    while not trainings and time.monotonic() < deadline and started.is_running():
        children = started.children(recursive=True)
        trainings = [child for child in children if any("train.py" in word for word in words_of(child))]
    assert trainings, (tmp_path / "log").read_text()
    started.terminate()
    assert started.wait(60) == 143
    _, alive = psutil.wait_procs(trainings, timeout=60)
    assert not alive


def words_of(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.NoSuchProcess:
        return []
