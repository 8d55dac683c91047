"""Tests of killed runs: they resume from the last complete checkpoint and have the losses of an undisturbed run.

tests/faults covers plain training, DDP, and kills at each point of a run.
"""

import json
import shutil

import pytest

from helpers import REPOSITORY, Finished
from test_strategies import same_losses
from workbench import complete_marks

# Kill every rank with SIGKILL before the checkpoint of the second epoch is marked as complete
UNMARKED = """
from guard.checkpoints import CheckpointCallback

def on_save(self, args, state, control, original=CheckpointCallback.on_save, **kwargs):
    if state.global_step == 4:
        original(self, args, state, control, **kwargs)
    if state.global_step == 8:
        os.kill(os.getpid(), 9)

CheckpointCallback.on_save = on_save
"""
RESUME = "--resume_from_checkpoint"


def tokens(run: Finished) -> dict[str, int]:
    return {name: count for name, count in run.record["train"].items() if name.endswith("_tokens")}


def test_resume_without_a_value_finds_the_checkpoint_of_a_sibling_run(train, workplace, table):
    family = workplace / "output" / "killed family"
    dead = train("killed", patch=UNMARKED, code=-9, OUTPUT_DIR=f"{family}/killed")
    assert complete_marks(family / "killed") == {"checkpoint-4": True, "checkpoint-8": False}, dead
    resumed = train("resumed", RESUME, OUTPUT_DIR="output/killed family/resumed")
    assert resumed.record["resumed_from"].endswith("killed/checkpoint-4")
    assert resumed.record["status"] == "completed"
    expected = table("plain")
    same_losses(resumed, expected)
    assert [entry["step"] for entry in resumed.record["eval"]] == [4, 8]
    assert complete_marks(family / "resumed") == {"checkpoint-8": True}
    assert resumed.record["train"]["loss_last"] == expected.record["train"]["loss_last"]
    assert tokens(resumed) == tokens(expected)


def test_version_2_0_0_wrote_a_checkpoint_and_a_record(train, bench, workplace):
    """The checkpoint is of the first of two epochs. The record has the losses of both."""
    saved = REPOSITORY / "tests/data/runs_of_2.0.0"
    shutil.copytree(saved / "checkpoint-4", workplace / "output/2.0.0/checkpoint-4")
    sizes = {"HIDDEN_SIZE": 8, "NUM_HEADS": 1, "NUM_LAYERS": 1, "FF_DIM": 8, "VOCAB_SIZE": 270, "SEQ_LENGTH": 320}
    sizes |= {"MODEL_NAME": "custom-gpt", "TRAIN_SIZE": 16, "EVAL_SIZE": 4, "MAX_LENGTH": 320, "BATCH_SIZE": 2}
    sizes |= {"DATASET": "data/squad_sample.json", "GRAD_ACC": 2, "LEARNING_RATE": 1e-2, "PADDING": "longest"}
    resumed = train("from_2.0.0", RESUME, "output/2.0.0/checkpoint-4", **sizes)
    losses = [each["loss"] for each in json.loads((saved / "results/b.json").read_text())["eval"]]
    assert [each["loss"] for each in resumed.record["eval"]] == pytest.approx(losses, rel=1e-5)
    shown = bench.run("--job", saved / "results/b.json", script="scripts/report.py")
    assert shown.out.count("5.15") == 1, shown


@pytest.mark.promise("reliability 5", "reliability 6")
def test_a_run_without_padding_resumes_with_the_same_order_on_any_rank_count(train):
    """A run that resumes in the middle of the second epoch trains on the rest of that epoch's questions.

    In the last step of an epoch, several ranks have questions that accelerate repeats. These do not count.
    """
    settings = {"ATTENTION": "sdpa", "PADDING": "none", "LOSS": "chunked", "GRAD_ACC": 1}
    settings |= {"TRAIN_SIZE": 41, "EVAL_SIZE": 8}
    flags = ["--save_strategy", "steps", "--save_steps", 15, "--save_total_limit", 9, "--logging_steps", 1]
    whole = train("rows_whole", *flags, **settings)
    resume = (*flags, RESUME, whole.output / "checkpoint-15")
    for ranks in (1, 2, 4):
        resumed = train(f"rows_{ranks}", *resume, ranks=ranks, **settings | {"BATCH_SIZE": 4 // ranks})
        assert ranks > 1 or tokens(resumed) == tokens(whole)
        rounding = 0 if ranks == 1 else 1e-5  # several ranks add the gradients in a different order
        assert resumed.losses == pytest.approx(whole.losses, abs=rounding, rel=0), ranks
        assert resumed.step_losses == pytest.approx(whole.step_losses, abs=rounding, rel=0), ranks
