"""The short part of gpu_check.py: tiny-bloom on one GPU by every way there is, saved, loaded and scored."""

import json
import os

import gpu_check
import pytest
import torch

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU here")
ROWS = [row.name for row in gpu_check.ROWS if not row.full]
PINNED = {"zero2_cpu_offload_pinned_memory": True, "zero2_cpu_offload": False}


@pytest.fixture(scope="module")
def rows(tmp_path_factory):
    folder = tmp_path_factory.mktemp("gpu")
    command = [gpu_check.sys.executable, str(gpu_check.REPOSITORY / "scripts" / "gpu_check.py"), "--any_version"]
    done = gpu_check.subprocess.run([*command, "--rows", *ROWS], cwd=folder, env=dict(os.environ), check=False)
    content = json.loads((folder / "results/gpu_check/gpu_check.json").read_text())
    return done.returncode, folder / "results/gpu_check", content["rows"]


@pytest.mark.parametrize("name", ROWS)
def test_row(rows, name):
    _, folder, results = rows
    assert results[name]["status"] == "completed", results[name]
    record = json.loads((folder / "results" / f"{name}.json").read_text())
    assert record["knobs"]["device"]["effective"] == "cuda:0"
    assert record["knobs"]["precision"] == {"requested": "fp16", "effective": "fp16"}
    assert record["eval"][1]["loss"] < record["eval"][0]["loss"] < 7.7, "log(2048) is 7.62, what an untrained model has"
    (peak,) = record["peak_gpu_memory"]
    assert 0 < peak["allocated_mib"] <= peak["reserved_mib"]
    if name in PINNED:
        assert record["knobs"]["optimizer pinned memory"] == {"requested": PINNED[name], "effective": PINNED[name]}


def test_it_ends_well(rows):
    assert rows[0] == 0
