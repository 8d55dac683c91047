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
