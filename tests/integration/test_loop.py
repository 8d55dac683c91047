"""Tests that exercises/loop.py, which has no Trainer, trains as train.py does."""

import re

import pytest

from helpers import REPOSITORY, Finished
from runs import RUNS, uses

LOOP = REPOSITORY / "exercises" / "loop.py"
# The class in which accelerate wraps the model. It shows that the strategy is in effect
WRAPPERS = {
    "plain": "BloomForCausalLM",
    "ddp": "DistributedDataParallel",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "full_shard": "FSDPBloomForCausalLM",
    "answer_ddp": "DistributedDataParallel",  # its last evaluation batches hold repeated questions
}
TOLERANCE = 2e-6  # loop.py prints six decimals, and adds the fp32 losses of 5 steps in another order than the Trainer


@uses(*WRAPPERS)
def test_the_loop_without_the_trainer_has_the_losses_and_steps_of_train(run: Finished, train):
    row = RUNS[run.job_id]
    loop = train(f"loop_{run.job_id}", *row.arguments, script=LOOP, ranks=row.ranks, **row.settings)
    # If each rank trained alone on all questions, there would be more steps, but no error
    first_line = f"{WRAPPERS[run.job_id]}, ranks: {row.world}, steps: {run.record['train']['steps']}"
    assert first_line in loop.out.splitlines(), loop
    assert losses("loss", loop) == pytest.approx(run.step_losses, abs=TOLERANCE, rel=0), loop
    assert losses("eval_loss", loop) == pytest.approx(run.losses, abs=TOLERANCE, rel=0), loop
    assert not loop.output.exists()


def losses(name: str, loop: Finished) -> list[float]:
    return [float(loss) for loss in re.findall(rf"^step \d+: {name} (\S+)$", loop.out, re.MULTILINE)]


def test_the_loop_rejects_a_mistyped_flag(bench):
    bench.refuses("--learning_rat: unknown flag; did you mean --learning_rate?", "--learning_rat", "1e-3", script=LOOP)
