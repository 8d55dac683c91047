"""Tests of killed runs: they resume from the last complete checkpoint and have the losses of an undisturbed run.

tests/faults covers plain training, DDP, and kills at each point of a run.
"""

import json

import pytest

from helpers import REPOSITORY, Finished
from test_strategies import same_losses
from workbench import complete_marks

# Kill every rank with SIGKILL, before or after the checkpoint of the second epoch is marked as complete
KILLED = """
from training.checkpoints import CheckpointCallback

def on_save(self, args, state, control, original=CheckpointCallback.on_save, **kwargs):
    if state.global_step == 8:
        original(self, args, state, control, **kwargs)
    if state.global_step == 16:
        {before}
        os.kill(os.getpid(), 9)

CheckpointCallback.on_save = on_save
"""
UNMARKED, MARKED = KILLED.format(before="pass"), KILLED.format(before="original(self, args, state, control, **kwargs)")
RESUME = "--resume_from_checkpoint"


def tokens(run: Finished) -> dict[str, int]:
    return {name: count for name, count in run.record["train"].items() if name.endswith("_tokens")}


def test_resume_without_a_value_finds_the_checkpoint_of_a_sibling_run(train, workplace, table):
    family = workplace / "output" / "killed family"
    dead = train("killed", patch=UNMARKED, code=-9, OUTPUT_DIR=f"{family}/killed")
    assert complete_marks(family / "killed") == {"checkpoint-8": True, "checkpoint-16": False}, dead
    resumed = train("resumed", RESUME, OUTPUT_DIR="output/killed family/resumed")
    assert resumed.record["resumed_from"].endswith("killed/checkpoint-8")
    assert resumed.record["status"] == "completed"
    expected = table("plain")
    same_losses(resumed, expected)
    assert [entry["step"] for entry in resumed.record["eval"]] == [8, 16]
    assert complete_marks(family / "resumed") == {"checkpoint-16": True}
    assert resumed.record["train"]["loss_last"] == expected.record["train"]["loss_last"]
    assert tokens(resumed) == tokens(expected)


def test_a_run_without_padding_resumes_with_the_same_order_on_any_rank_count(train):
    """A run that resumes in the middle of the second epoch trains on the rest of that epoch's questions."""
    settings = {"ATTENTION": "sdpa", "PADDING": "none", "LOSS": "chunked", "GRAD_ACC": 1}
    settings |= {"TRAIN_SIZE": 40, "EVAL_SIZE": 8}
    flags = ["--save_strategy", "steps", "--save_steps", 15, "--save_total_limit", 9, "--logging_steps", 1]
    whole = train("rows_whole", *flags, **settings)
    resume = (*flags, RESUME, whole.output / "checkpoint-15")
    for ranks in (1, 2, 4):
        resumed = train(f"rows_{ranks}", *resume, ranks=ranks, **settings | {"BATCH_SIZE": 4 // ranks})
        assert tokens(resumed) == tokens(whole)
        rounding = 0 if ranks == 1 else 1e-5  # several ranks add the gradients in a different order
        assert resumed.losses == pytest.approx(whole.losses, abs=rounding, rel=0), ranks
        assert resumed.step_losses == pytest.approx(whole.step_losses, abs=rounding, rel=0), ranks


def test_zero2_on_two_ranks_skips_a_truncated_checkpoint(train, table):
    flags = ("--deepspeed", "ds_configs/zero2.json")
    options = {"ranks": 2, "BATCH_SIZE": 2}
    dead = train("zero2_killed", *flags, "--save_total_limit", 2, patch=MARKED, code=-9, **options)
    assert complete_marks(dead.output) == {"checkpoint-8": True, "checkpoint-16": True}, dead
    shards = sorted(dead.output.glob("checkpoint-16/global_step16/*optim_states.pt"))
    assert len(shards) == 2, "one optimizer share per rank"
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[: len(content) // 2])

    resumed = train("zero2_killed", *flags, RESUME, **options)
    assert resumed.record["resumed_from"] == "output/zero2_killed/checkpoint-8"
    same_losses(resumed, table("zero2"))
    assert tokens(resumed) == tokens(table("plain"))
    assert resumed.record["status"] == "completed"
    assert complete_marks(resumed.output) == {"checkpoint-16": True}, "checkpoint-16 is written again, 8 is removed"


def test_sharded_fsdp_checkpoints_resume_and_the_model_is_complete(train, workplace, table):
    """With sharded checkpoints, transformers' own Trainer cannot save a complete model at the end."""
    content = json.loads((REPOSITORY / "fsdp_configs" / "full_shard.json").read_text())
    (workplace / "sharded.json").write_text(json.dumps(content | {"state_dict_type": "SHARDED_STATE_DICT"}))
    flags = ("--fsdp", "--fsdp_config", "sharded.json")
    options = {"ranks": 2, "BATCH_SIZE": 2}
    dead = train("sharded_killed", *flags, patch=UNMARKED, code=-9, **options)
    assert complete_marks(dead.output) == {"checkpoint-8": True, "checkpoint-16": False}, dead
    assert list((dead.output / "checkpoint-8").glob("pytorch_model_fsdp_0/*.distcp")), "one file per rank"
    resumed = train("sharded_resumed", *flags, RESUME, dead.output, **options)
    assert resumed.effective("checkpoint format") == "SHARDED_STATE_DICT"
    same_losses(resumed, table("plain"))
    assert (resumed.output / "model.safetensors").stat().st_size > 4 * resumed.record["parameters"]
