"""A killed run goes on from its last complete checkpoint, and ends as if it had never been killed."""

import shutil
from pathlib import Path

import pytest

from helpers import Finished, patched, run

TOLERANCE = 1e-4
# SIGKILL on every rank while the checkpoint of the second epoch is written, or just after it
KILLED = """
import os
from training.checkpoints import CheckpointCallback

def on_save(self, args, state, control, original=CheckpointCallback.on_save, **kwargs):
    if state.global_step == 8:
        original(self, args, state, control, **kwargs)
    if state.global_step == 16:
        {before}
        os.kill(os.getpid(), 9)

CheckpointCallback.on_save = on_save
"""


@pytest.fixture(scope="module")
def killed(workplace) -> Finished:
    """Plain: checkpoint-8 is complete, checkpoint-16 has all its files but was never marked as complete."""
    script = patched(workplace, "killed", KILLED.format(before="pass"))
    folder = workplace / "output" / "killed family"
    done = run(workplace, "killed", script=script, code=-9, OUTPUT_DIR=f"{folder}/killed")
    assert checkpoints(folder / "killed") == {"checkpoint-8": True, "checkpoint-16": False}, done
    assert done.record["status"] == "running", "SIGKILL leaves no time to say otherwise"
    return done


def checkpoints(folder: Path) -> dict[str, bool]:
    """Name of each checkpoint, and whether it is marked as complete."""
    return {path.name: (path / "complete.json").exists() for path in folder.glob("checkpoint-*")}


def test_resume_without_a_value_finds_the_checkpoint_of_a_sibling_run(workplace, killed: Finished, table):
    family = "output/killed family"
    resumed = run(workplace, "resumed", "--resume_from_checkpoint", OUTPUT_DIR=f"{family}/resumed")
    assert resumed.record["resumed_from"].endswith("killed/checkpoint-8")
    assert resumed.record["status"] == "completed"
    expected = table("plain")
    assert resumed.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0)
    assert [entry["step"] for entry in resumed.record["eval"]] == [8, 16]
    assert checkpoints(workplace / family / "resumed") == {"checkpoint-16": True}
    assert resumed.record["train"]["loss_last"] == pytest.approx(expected.record["train"]["loss_last"], abs=TOLERANCE)
    assert tokens(resumed) == tokens(expected)


def tokens(run: Finished) -> dict[str, int]:
    return {name: count for name, count in run.record["train"].items() if name.endswith("_tokens")}


def test_sequences_are_grouped_the_same_way_behind_a_checkpoint(workplace):
    """In the middle of an epoch: the batches behind it are those that an undisturbed run has there."""
    settings = {
        "SAMPLING": "group_by_length",
        "PADDING": "longest",
        "LOSS": "chunked",
        "TRAIN_SIZE": 32,
        "EVAL_SIZE": 8,
    }
    flags = ["--save_strategy", "steps", "--save_steps", 3, "--save_total_limit", 9, "--logging_steps", 1]
    whole = run(workplace, "grouped_whole", *flags, NUM_EPOCHS=1, GRAD_ACC=1, **settings)
    checkpoint = whole.output / "checkpoint-3"
    resumed = run(
        workplace, "regrouped", *flags, "--resume_from_checkpoint", checkpoint, NUM_EPOCHS=1, GRAD_ACC=1, **settings
    )
    assert resumed.effective("sampling") == "group_by_length"
    assert tokens(resumed) == tokens(whole)
    assert resumed.losses == whole.losses
    assert resumed.record["train"]["loss_last"] == whole.record["train"]["loss_last"]


def test_incomplete_checkpoint_is_refused(workplace, killed: Finished):
    wanted = f"{workplace}/output/killed family/killed/checkpoint-16"
    refused = run(workplace, "refused", "--resume_from_checkpoint", wanted, code=4)
    assert refused.error_lines == [
        f"error: {wanted}: is no complete checkpoint; choose a folder with a complete.json whose files are all there"
    ]
    assert not refused.record_path.exists()
    assert not refused.output.exists()


def test_no_checkpoint_at_all(workplace):
    options = {"OUTPUT_DIR": "output/nothing/here"}
    refused = run(workplace, "no_checkpoint", "--resume_from_checkpoint", code=4, **options)
    assert refused.error_lines == [
        "error: --resume_from_checkpoint: no complete checkpoint in output/nothing/here; "
        "leave the flag out to start anew"
    ]
    assert not (workplace / "output" / "nothing").exists()


def test_zero2_on_two_ranks_skips_a_truncated_checkpoint(workplace, table):
    config = ("--deepspeed", "ds_configs/zero2.json")
    options = {"processes": 2, "BATCH_SIZE": 2}
    before = "original(self, args, state, control, **kwargs)"
    script = patched(workplace, "zero2_killed", KILLED.format(before=before))
    dead = run(workplace, "zero2_killed", *config, "--save_total_limit", 2, script=script, code=1, **options)
    assert checkpoints(dead.output) == {"checkpoint-8": True, "checkpoint-16": True}, dead
    shards = sorted(dead.output.glob("checkpoint-16/global_step16/*optim_states.pt"))
    assert len(shards) == 2, "one optimizer share per rank"
    content = shards[1].read_bytes()
    shards[1].write_bytes(content[: len(content) // 2])

    resumed = run(workplace, "zero2_killed", *config, "--resume_from_checkpoint", **options)
    assert resumed.record["resumed_from"] == "output/zero2_killed/checkpoint-8"
    assert resumed.losses == pytest.approx(table("zero2-2").losses, abs=TOLERANCE, rel=0)
    assert tokens(resumed) == tokens(table("plain"))
    assert resumed.record["status"] == "completed"
    assert checkpoints(resumed.output) == {"checkpoint-16": True}, "written again, and the older one removed"


def test_checkpoint_of_other_ranks_is_refused(workplace, table):
    """A ZeRO checkpoint holds one share per rank."""
    source = table("zero2-2").output / "checkpoint-16"
    wanted = workplace / "output" / "copied" / "checkpoint-16"
    shutil.copytree(source, wanted)
    refused = run(workplace, "one_rank", "--deepspeed", "ds_configs/zero2.json",
                  "--resume_from_checkpoint", wanted, code=4)  # fmt: skip
    assert refused.error_lines == [
        f"error: {wanted}: is of another training: ranks was 2, is 1; "
        "give the same settings, or leave --resume_from_checkpoint out to start anew"
    ]
