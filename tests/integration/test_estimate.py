"""Compare the estimates of estimate_memory.py with the bytes on the ranks of real runs."""

import json
from dataclasses import replace

import pytest

from estimate import predict_from_record
from estimate.command_line import parse_memory_plan
from estimate.memory import estimate_parts, measure_python, move_to_cpu, stage2_gradients, totals
from estimate.model_shape import trace_shape
from estimate.predict_from_record import predicted_memory
from helpers import TINY, Finished, program
from runs import HELD, RUNS, uses
from shared.units import MIB
from test_lora import chosen

RUNS_OF_LORA = [name for name in HELD if name.startswith("lora_")]
STATES = ("parameters", "gradients", "optimizer state")


@pytest.mark.promise("held memory, and the peak of a step, match the estimate")
@uses(*(name for name in HELD if name not in RUNS_OF_LORA), *chosen(RUNS_OF_LORA))
def test_model_states_match_the_estimate(run: Finished, monkeypatch):
    """The bytes match within 5 % on every rank, and the record predicts the same values as the command line."""
    row = RUNS[run.job_id]
    monkeypatch.chdir(run.folder)
    variables = {name: str(value) for name, value in (TINY | row.settings).items()}
    settings = parse_memory_plan([*row.arguments, "--gpus", str(row.world)], environment=variables)
    parts = estimate_parts(settings)
    expected = {part.name: part.gpu + part.cpu for part in parts if part.name in STATES}
    held = run.record["held"]
    assert len(held) == row.world
    stage = settings.zero.get("stage")
    for what in STATES:
        measured = [rank[what.replace(" ", "_")] for rank in held]
        assert max(measured) == pytest.approx(expected[what], rel=0.05), what
        if stage == 2 and what == "gradients":
            size = 2 if "bf16" in run.job_id else 4
            shares = [size * n for n in map(sum, stage2_gradients(trace_shape(settings).trained_sizes, row.world))]
            assert measured == pytest.approx(shares, rel=0.05)
        else:
            assert min(measured) == pytest.approx(expected[what], rel=0.05), what

    # Measure Python's memory in this process, because two processes differ by some MiB
    monkeypatch.setattr(predict_from_record, "measure_python_elsewhere", measure_python)
    assert '"auto"' not in json.dumps(run.record["configs"])  # the record holds the effective configs
    on_gpu, on_node = totals(parts, row.world)
    on_gpus = predicted_memory(run.record | {"hardware": {"gpus": row.world}})
    assert on_gpus == pytest.approx((on_gpu / MIB, on_node / MIB, *(expected[what] / MIB for what in STATES)))
    without_gpu = replace(settings, trainer=replace(settings.trainer, use_cpu=True))
    node_without = totals(move_to_cpu(estimate_parts(without_gpu)), row.world)[1] / MIB
    assert predicted_memory(run.record)[:2] == (None, pytest.approx(node_without))


@pytest.mark.promise("held memory, and the peak of a step, match the estimate")
@pytest.mark.parametrize(
    "name",
    [
        "bloom, bf16, FULL_SHARD",
        *(
            pytest.param(name, marks=pytest.mark.faults)
            for name in (
                "llama, fp32",
                "bloom, bf16, checkpointing",
                "bloom, bf16, ZeRO-2, 1 micro batch",
                "bloom, bf16, LoRA, ZeRO-3",
            )
        ),
    ],
)
def test_peak_memory_of_a_step_matches_the_estimate(name, tmp_path):
    """Five rows of the benchmark measure the bytes of real tensors during a step."""
    prediction = program("benchmarks/prediction.py")
    row = prediction.ROWS[name]
    prediction.make_models(tmp_path, row.model)
    mib = prediction.train(tmp_path, row)
    assert mib["measured"] == pytest.approx(mib["predicted"], rel=0.03)
