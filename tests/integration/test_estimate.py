"""What estimate_memory.py predicts, against the bytes that the ranks of real runs hold."""

import json

import pytest

from estimate import predict_from_record
from estimate.memory import MIB, estimate, python_itself, stage2_gradients, totals, without_gpu
from estimate.model_shape import shape_for
from estimate.predict_from_record import predicted_memory
from estimate_memory import read_options
from helpers import TINY, Finished
from runs import HELD, RUNS, uses

STATES = ("parameters", "gradients", "optimizer state")


@uses(*HELD)
def test_states_are_as_estimated(run: Finished, monkeypatch):
    """Within 5 % on every rank; buffers stand in a row of their own. The record predicts what the command line does."""
    row = RUNS[run.job_id]
    monkeypatch.chdir(run.folder)
    variables = {name: str(value) for name, value in (TINY | row.settings).items()}
    options = read_options([*row.arguments, "--gpus", str(row.world)], environment=variables)
    parts = estimate(options)
    expected = {part.what: part.gpu + part.cpu for part in parts if part.what in STATES}
    held = run.record["held"]
    assert len(held) == row.world
    stage = (options.deepspeed_config or {}).get("zero_optimization", {}).get("stage")
    for what in STATES:
        measured = [of_rank[what.replace(" ", "_")] for of_rank in held]
        assert max(measured) == pytest.approx(expected[what], rel=0.05), what
        if stage == 2 and what == "gradients":
            size = 2 if "bf16" in run.job_id else 4
            shares = [size * n for n in map(sum, stage2_gradients(shape_for(options).sizes, row.world))]
            assert measured == pytest.approx(shares, rel=0.05)
        else:
            assert min(measured) == pytest.approx(expected[what], rel=0.05), what

    monkeypatch.setattr(
        predict_from_record, "python_of_the_estimate", python_itself
    )  # of two processes it differs by some MiB
    assert '"auto"' not in json.dumps(run.record["configs"])  # the configs in effect
    on_gpu, on_node = totals(parts, row.world)
    on_gpus = predicted_memory(run.record | {"hardware": {"gpus": row.world}})
    assert on_gpus == pytest.approx((on_gpu / MIB, on_node / MIB, *(expected[what] / MIB for what in STATES)))
    node_without = totals(without_gpu(parts), row.world)[1] / MIB
    assert predicted_memory(run.record)[:2] == (None, pytest.approx(node_without))
