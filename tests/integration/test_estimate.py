"""What estimate_memory.py predicts, against the bytes that the ranks of real runs hold."""

import json

import pytest

from estimate_memory import estimate, read_options, shape_for, stage2_gradients
from helpers import TINY
from runs import MEASURED, RUNS, uses

STATES = ("parameters", "gradients", "optimizer state")


@uses(*MEASURED)
def test_states_are_as_estimated(run, monkeypatch):
    """Within 5 % on every rank; buffers stand in a row of their own."""
    world = RUNS[run.job_id].processes
    variables = {name: str(value) for name, value in (TINY | RUNS[run.job_id].variables).items()}
    monkeypatch.chdir(run.folder)
    command = [*RUNS[run.job_id].arguments, "--gpus", str(world)]
    options = read_options(command, environment=variables)
    expected = {part.what: part.gpu + part.cpu for part in estimate(options) if part.what in STATES}
    held = [json.loads((run.folder / f"memory-{run.job_id}-{rank}.json").read_text()) for rank in range(world)]
    for what in STATES:
        measured = [of_rank[what] for of_rank in held]
        assert max(measured) == pytest.approx(expected[what], rel=0.05), what
        if (options.deepspeed_config or {}).get("zero_optimization", {}).get("stage") == 2 and what == "gradients":
            size = 2 if "bf16" in run.job_id else 4
            shares = [size * n for n in map(sum, stage2_gradients(shape_for(options).sizes, world))]
            assert measured == pytest.approx(shares, rel=0.05)
        else:
            assert min(measured) == pytest.approx(expected[what], rel=0.05), what


@uses("plain", "ddp-2", "zero3-2", "full_shard-2")
def test_a_run_records_what_was_predicted_for_it(run):
    world = RUNS[run.job_id].processes
    estimate = run.record["estimate"]
    assert estimate["gpu_mib"] is None
    measured = sum(run.record["peak_process_mib"])
    assert estimate["node_mib"] == pytest.approx(measured, rel=0.5), "mostly Python and its libraries"
    step = estimate["step"]
    assert step["seconds"] == pytest.approx(step["compute"] + step["optimizer"] + step["communication"], rel=1e-3)
    assert step["samples_per_second"] == pytest.approx(4 * 2 / step["seconds"], rel=1e-3)
    assert (step["communication"] > 0) == (world > 1)
    assert step["hidden"] == 0, "on the CPU both need the same cores"
    rates = estimate["rates"]
    assert rates["matmul_tflops"] == run.record["train"]["matmul_peak_tflops"]
    assert rates["memory_gb_per_s"] > 0
    assert (rates["bus_gb_per_s"] is None) == (world == 1)
    missing = {name for name in run.record["missing"] if name.startswith("estimate")}
    assert missing == {"estimate.gpu_mib", *(["estimate.rates.bus_gb_per_s"] if world == 1 else [])}
