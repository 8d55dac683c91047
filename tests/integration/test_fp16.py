"""Tests of fp16 on the CPU (fp16_on_cpu.py): the losses fall and are equal for all methods.

fp16 is the default on GPUs.
"""

import itertools
import re

import pytest

from helpers import Finished
from runs import FP16, MORE_FP16, RUNS, fp16, uses

TOLERANCE = 1e-3
NORM_TOLERANCE = 0.01
# Stage 0 initializes its optimizer with a step of empty gradients. Adam counts this step, so its first updates are
# too small.
STAGE_0_TOLERANCE = 0.05


def norms(run: Finished) -> list[float]:
    """Gradient norms in the log. Norms of gradients that are still scaled would be 65,536 times as large."""
    return [float(norm) for norm in re.findall(r"'grad_norm': '([^']+)'", run.log)]


@uses(*FP16, *(pytest.param(name, marks=pytest.mark.faults) for name in MORE_FP16))
def test_fp16_losses_match_the_plain_trainer(run: Finished, table):
    assert run.effective("precision") == "fp16"
    expected = table("fp16_plain")
    assert expected.losses[0] - expected.losses[1] > 0.1, "equal losses prove nothing if the loss hardly moves"
    stage_0 = "zero0" in run.job_id
    tolerance = STAGE_0_TOLERANCE if stage_0 else TOLERANCE
    assert run.losses == pytest.approx(expected.losses, abs=tolerance, rel=0), run
    assert norms(expected)
    assert norms(run) == pytest.approx(norms(expected), rel=0.2 if stage_0 else NORM_TOLERANCE), run


@pytest.mark.promise("Tensor parallelism: the same losses, also in fp16; what it refuses; a stop")
@uses("fp16_tp2", pytest.param("fp16_tp2_fsdp2", marks=pytest.mark.faults))
def test_fp16_tensor_parallel_losses_match_the_plain_trainer(run: Finished, table):
    assert run.effective("precision") == "fp16"
    expected = table("fp16_gpt_plain")
    assert run.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0), run
    assert norms(run) == pytest.approx(norms(expected), rel=NORM_TOLERANCE)


def test_the_gradient_norm_is_logged_without_clipping(train, table):
    """Tensor parallelism computes the norm separately. The reference clips nothing, as all its norms are below 1."""
    row = RUNS["fp16_tp2"]
    how = row.settings | {"script": row.script, "ranks": row.ranks}
    run = train("fp16_tp2_unclipped", *row.arguments, "--max_grad_norm", 0, **how)
    assert norms(run) == pytest.approx(norms(table("fp16_gpt_plain")), rel=NORM_TOLERANCE)


@pytest.mark.parametrize("name", ["full_shard", "tp2"])
def test_an_overflow_on_one_rank_skips_the_step_on_all(train, name):
    """Rank 1 gets an infinite gradient in the second step. train.py's fused AdamW must skip the step on all ranks."""
    row = fp16(RUNS[name], SAVE_STRATEGY="no")
    how = row.settings | {"script": row.script, "ranks": row.ranks}
    run = train(f"fp16_overflow_{name}", *row.arguments, OVERFLOW_STEP=2, **how)
    scales = {rank: re.findall(rf"rank {rank} scale (\d+) ", run.log) for rank in "01"}
    assert scales["0"] == scales["1"]
    halved = [later < earlier for earlier, later in itertools.pairwise(map(int, scales["0"]))]
    assert halved == [False, True] + [False] * (len(halved) - 2)
    assert run.losses[0] > run.losses[1]
