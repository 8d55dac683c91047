"""Tests that scripts/loop.py, which has no Trainer, trains as train.py does."""

import re

import pytest

from helpers import REPOSITORY, Finished
from runs import RUNS, uses

LOOP = REPOSITORY / "scripts" / "loop.py"
# The class in which accelerate wraps the model. It shows that the strategy is in effect
WRAPPERS = {
    "plain": "BloomForCausalLM",
    "ddp": "DistributedDataParallel",
    "zero1": "DeepSpeedEngine",
    "zero2": "DeepSpeedEngine",
    "zero3": "DeepSpeedEngine",
    "full_shard": "FSDPBloomForCausalLM",
    "chat_ddp": "DistributedDataParallel",  # its last evaluation batches hold repeated questions
}
TOLERANCE = 2e-6  # loop.py prints six decimals, and adds the fp32 losses of 5 steps in another order than the Trainer


LOOP_WITH_SEEDS = f"""
import sys
sys.path.insert(0, {str(LOOP.parent)!r})
import loop
import torch
loop.main()
print("seed", torch.initial_seed())
"""


@uses(*WRAPPERS)
def test_the_loop_without_the_trainer_has_the_losses_and_steps_of_train(run: Finished, train, bench):
    row = RUNS[run.job_id]
    script = bench.write("loop_with_seeds.py", LOOP_WITH_SEEDS)
    loop = train(f"loop_{run.job_id}", *row.arguments, script=script, ranks=row.ranks, **row.settings)
    # If each rank trained alone on all questions, there would be more steps, but no error
    first_line = f"{WRAPPERS[run.job_id]}, ranks: {row.world}, steps: {run.record['train']['steps']}"
    assert first_line in loop.out.splitlines(), loop
    assert losses("loss", loop) == pytest.approx(run.step_losses, abs=TOLERANCE, rel=0), loop
    assert losses("eval_loss", loop) == pytest.approx(run.losses, abs=TOLERANCE, rel=0), loop
    seeds = {str(42 + rank) for rank in range(row.world)}
    assert {*re.findall(r"^seed (\d+)$", loop.out, re.MULTILINE)} == seeds, (
        "all ranks would have the same dropout masks"
    )
    assert not loop.output.exists()


def losses(name: str, loop: Finished) -> list[float]:
    return [float(loss) for loss in re.findall(rf"^step \d+: {name} (\S+)$", loop.out, re.MULTILINE)]


FLAGS = (
    "--data_seed=7",
    "--max_grad_norm=0",
    "--adam_beta1=0.7",
    "--adam_beta2=0.9",
    "--adam_epsilon=1e-3",
    "--warmup_steps=0.2",
    "--lr_scheduler_type=cosine",
    "--logging_steps=0.3",
)


def test_the_loop_obeys_flags_that_change_the_losses(train):
    run = train("flags", *FLAGS)
    loop = train("loop_flags", *FLAGS, "--save_strategy", "steps", script=LOOP)
    assert losses("loss", loop) == pytest.approx(run.step_losses, abs=TOLERANCE, rel=0), loop
    assert losses("eval_loss", loop) == pytest.approx(run.losses, abs=TOLERANCE, rel=0), loop


UNSUPPORTED = "loop.py does not support the value ...; leave it out, or use train.py"


@pytest.mark.parametrize(
    ("line", "words", "variables"),
    [
        ("--learning_rat: unknown flag; did you mean --learning_rate?", ["--learning_rat", "1e-3"], {}),
        (f"--label_smoothing_factor: {UNSUPPORTED}", ["--label_smoothing_factor", "0.1"], {}),
        (f"--optim: {UNSUPPORTED}", ["--optim", "sgd"], {}),
        (f"--lr_scheduler_type: {UNSUPPORTED}", ["--lr_scheduler_type", "greedy"], {}),
        (f"PADDING: {UNSUPPORTED}", [], {"PADDING": "none", "ATTENTION": "sdpa"}),
        (f"LORA_RANK: {UNSUPPORTED}", [], {"LORA_RANK": 8}),
    ],
)
def test_the_loop_rejects_what_it_does_not_support(bench, line, words, variables):
    bench.refuses(line, *words, script=LOOP, **variables)
