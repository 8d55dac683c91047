"""gpu_check.py with the rows of a CPU: trained, saved, loaded again and scored; what failed is run again."""

import json

import psutil

from helpers import Process, run

ROWS = ("full_shard", "ddp")
SCRIPT = {"script": "scripts/gpu_check.py"}


def test_rows_are_trained_saved_loaded_and_scored(workplace, background):
    first = run(workplace, "first", "--cpu", "--rows", "ddp", "--timeout", 1, **SCRIPT, code=3)
    assert "ddp: failed (error: time: still running after 1 s" in first.log
    second = run(workplace, "second", "--cpu", "--rows", *ROWS, **SCRIPT)
    rows = json.loads((workplace / "results/gpu_check/gpu_check.json").read_text())["rows"]
    for result in rows.values():
        assert (result["status"], result["precision"]) == ("completed", "fp32")
        assert 7 < result["eval_loss"] < 7.6, "log(2048) is 7.62, what an untrained model has"
        assert abs(result["reloaded_loss"] - result["eval_loss"]) < 1e-4
    assert abs(rows["ddp"]["eval_loss"] - rows["full_shard"]["eval_loss"]) < 1e-3, "one rank, the same training"
    assert 0 <= rows["full_shard"]["f1"] <= 100
    text = (workplace / "results/gpu_check/gpu_check.md").read_text()
    assert text.count("| completed |") == len(ROWS)
    assert text in second.log

    ended = background("ended", "--cpu", "--rows", "plain", **SCRIPT)
    trainings = ended.until(lambda: trainings_of(ended))
    ended.popen.terminate()
    assert ended.wait().code == 143
    _, alive = psutil.wait_procs(trainings, timeout=60)
    assert not alive, "a call that is ended leaves no training"


def trainings_of(called: Process) -> list[psutil.Process]:
    children = psutil.Process(called.popen.pid).children(recursive=True)
    return [child for child in children if any("train.py" in word for word in child.cmdline())]
