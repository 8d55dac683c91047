"""--padding and --labels: what changes the loss and what must not."""

import re

import pytest

from helpers import Finished, patched, run
from runs import XQUAD, uses

TOLERANCE = 1e-4


@uses("sequence_longest")
def test_padding_does_not_change_the_loss_of_sequence_labels(run: Finished, table):
    assert run.effective("padding") == "longest"
    assert run.losses == pytest.approx(table("plain").losses, abs=TOLERANCE, rel=0)


@uses("answer_longest")
def test_padding_does_not_change_the_loss_of_answer_labels(run: Finished, table):
    padded = table("answer_max_length")
    assert (padded.effective("padding"), run.effective("padding")) == ("max_length", "longest")
    assert run.losses == pytest.approx(padded.losses, abs=TOLERANCE, rel=0)


@uses("answer_max_length", "all_max_length")
def test_each_label_mode_has_a_loss_of_its_own(run: Finished, table):
    assert run.effective("label mode") == run.job_id.split("_")[0]
    for mine, sequence in zip(run.losses, table("plain").losses, strict=True):
        assert abs(mine - sequence) > 100 * TOLERANCE


@uses("all_max_length")
def test_counted_padding_makes_the_loss_small(run: Finished, table):
    # a third of the 256 positions is padding, which is learned at once
    assert run.losses[-1] < table("plain").losses[-1] - 0.5


@uses("20_per_rank")
def test_samples_per_gpu_makes_the_training_set_grow_with_the_ranks(run: Finished):
    assert run.record["train_size"] == 40
    assert run.record["knobs"]["train size"] == {"requested": 40, "effective": 40}
    assert run.record["steps_per_epoch"] == 5  # micro batch 2 x accumulation 2 x 2 ranks


@pytest.mark.skipif(not XQUAD.exists(), reason=f"{XQUAD} is not here")
@uses("xquad")
def test_500_real_questions(run: Finished):
    """The main job: see `runs.OTHERS` for its sizes."""
    record = run.record
    assert record["status"] == "completed"
    assert (record["train_size"], record["eval_size"], len(run.losses)) == (500, 100, 1)
    assert record["train"]["loss_last"] < 7  # log(2048) is 7.62, what an untrained model has
    assert 0 <= record["exact_match"] <= record["f1"] <= 100


PRINT_WIDTHS = """
import os
from training import trainer
original = trainer.count_tokens
def count_tokens(batch):
    width, rank = batch['input_ids'].shape[1], os.environ['RANK']
    print(f"rank {rank} has a batch of {width} tokens.\\n", end="", flush=True)
    return original(batch)
trainer.count_tokens = count_tokens
"""


def widths(run: Finished) -> list[list[int]]:
    """Of each rank, the padded length of its micro batches in order."""
    return [
        [int(width) for width in re.findall(rf"rank {rank} has a batch of (\d+) tokens", run.log)] for rank in (0, 1)
    ]


def test_ranks_have_sequences_of_similar_length_at_the_same_time(workplace):
    script = patched(workplace, "print_widths", PRINT_WIDTHS)
    options = {"processes": 2, "script": script, "PADDING": "longest", "BATCH_SIZE": 2, "NUM_EPOCHS": 1}
    apart = {}
    for sampling in ("random", "group_by_length"):
        done = run(workplace, f"widths {sampling}", SAMPLING=sampling, SAVE_STRATEGY="no", **options)
        first, second = widths(done)
        assert len(first) == len(second) == 64 / 2 / 2
        apart[sampling] = sum(abs(a - b) for a, b in zip(first, second, strict=True)) / len(first)
    assert apart["group_by_length"] < apart["random"] / 2
