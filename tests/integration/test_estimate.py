"""What estimate_memory.py predicts, against the bytes that the ranks of real runs hold."""

import json

import pytest

from estimate.memory import MIB, estimate, stage2_gradients, totals, without_gpu
from estimate.model_shape import shape_for
from estimate.of_record import predicted_memory
from estimate_memory import read_options
from helpers import TINY
from runs import MEASURED, RUNS, uses

STATES = ("parameters", "gradients", "optimizer state")


@pytest.fixture
def options(run, monkeypatch):
    """As estimate_memory.py reads them from the run's own command and variables."""
    row = RUNS[run.job_id]
    variables = TINY | {"BATCH_SIZE": 4 // row.processes} | row.variables  # as Run.start sets them
    monkeypatch.chdir(run.folder)
    command = [*row.arguments, "--gpus", str(row.processes)]
    variables = {name: str(value) for name, value in variables.items()}
    return read_options(command, environment=variables)


@uses("plain", "zero2-2", "zero3_cpu_offload-2", "full_shard-2", "hybrid_shard_2x2-4", "gpt_ddp", "chunked_plain")
def test_a_record_predicts_what_the_command_line_does(run, options):
    world = RUNS[run.job_id].processes
    held = estimate(options)
    assert '"auto"' not in json.dumps(run.record["configs"])  # the configs in effect
    on_cpu = predicted_memory(run.record)
    assert on_cpu.gpu_mib is None
    assert on_cpu.node_mib == pytest.approx(totals(without_gpu(held), world)[1] / MIB)
    on_gpus = run.record | {"hardware": {"gpus": world}}
    on_gpu, on_node = totals(held, world)
    assert predicted_memory(on_gpus) == pytest.approx((on_gpu / MIB, on_node / MIB))


@uses(*MEASURED)
def test_states_are_as_estimated(run, options):
    """Within 5 % on every rank; buffers stand in a row of their own."""
    world = RUNS[run.job_id].processes
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
