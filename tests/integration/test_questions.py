"""Tests of a run's questions, batches and labels: --labels, --padding, --samples_per_gpu and sampling."""

import json
import re

import pytest

from helpers import XQUAD, Finished
from runs import LABELS, OTHER_BATCHES, uses
from test_strategies import TOLERANCE


@uses("sequence_longest")
def test_padding_does_not_change_the_loss(run: Finished, table):
    assert (table("plain").effective("padding"), run.effective("padding")) == ("max_length", "longest")
    assert run.losses == pytest.approx(table("plain").losses, abs=TOLERANCE, rel=0)


@uses(*OTHER_BATCHES)
def test_loss_of_few_labels_is_independent_of_padding_batches_and_ranks(run: Finished, table):
    assert run.effective("padding") == "longest"
    assert run.losses == pytest.approx(table("answer").losses, abs=TOLERANCE, rel=0), run


@uses(*LABELS)
def test_each_label_mode_has_a_different_loss(run: Finished, table):
    mode = run.job_id.split("_")[0]
    assert run.effective("label mode") == mode
    for mine, sequence in zip(run.losses, table("plain").losses, strict=True):
        assert (abs(mine - sequence) > 100 * TOLERANCE) == (mode != "sequence")
    if mode == "all":  # the loss includes padding, which the model learns at once
        assert run.losses[-1] < table("plain").losses[-1] - 0.5


@uses("tracked")
def test_samples_per_gpu_scales_the_training_set_with_the_ranks(run: Finished):
    assert run.record["train_size"] == 40
    assert run.record["knobs"]["train size"] == {"requested": 40, "effective": 40}
    assert run.record["steps_per_epoch"] == 5  # micro batch 2 x accumulation 2 x 2 ranks


@pytest.mark.skipif(not XQUAD.exists(), reason=f"{XQUAD} is not here")
@uses("xquad")
def test_500_real_questions(run: Finished):
    """`runs.OTHERS` has the sizes of this run."""
    record = run.record
    assert record["status"] == "completed"
    assert (record["train_size"], record["eval_size"], len(run.losses)) == (500, 100, 1)
    assert record["train"]["loss_last"] < 7  # an untrained model has a loss of log(2048) = 7.62
    assert 0 <= record["exact_match"] <= record["f1"] <= 100


PRINT_LENGTHS = """
import os
from training import trainer
original = trainer.count_tokens
def count_tokens(batch):
    print("LENGTHS", os.environ["RANK"], batch["attention_mask"].sum(1).tolist(), flush=True)
    return original(batch)
trainer.count_tokens = count_tokens
load = train.load_squad
def load_squad(*arguments):
    found = load(*arguments)
    print("TABLE", *(type(part.data).__name__ for part in found), flush=True)
    return found
train.load_squad = load_squad
"""


def test_group_by_length_groups_similar_lengths_on_all_ranks(train):
    flags = ("--train_sampling_strategy", "group_by_length", "--eval_strategy", "no")
    options = {"ranks": 2, "BATCH_SIZE": 2, "NUM_EPOCHS": 2, "PADDING": "longest", "SAVE_STRATEGY": "no"}
    grouped = train("grouped", *flags, patch=PRINT_LENGTHS, **options)
    assert grouped.record["settings"]["train_sampling_strategy"] == "group_by_length"
    by_rank = [[json.loads(found) for found in re.findall(rf"LENGTHS {rank} (.*)", grouped.log)] for rank in "01"]
    batches = [first + second for first, second in zip(*by_rank, strict=True)]
    assert [len(batch) for batch in batches] == [4] * 32
    epochs = batches[:16], batches[16:]
    assert epochs[0] != epochs[1]
    all_lengths = [sorted(length for batch in epoch for length in batch) for epoch in epochs]
    assert all_lengths[0] == all_lengths[1]
    # The 64 questions have lengths from 127 to 194. In a batch, the longest and the shortest question differ by 30 on
    # average in random order, and by 11 if each group of 16 questions is sorted.
    spread = sum(max(batch) - min(batch) for batch in batches) / len(batches)
    assert spread < 15, batches
    # The tokens must be memory-mapped: all 87,599 questions of SQuAD must not be in memory
    assert grouped.log.count("TABLE MemoryMappedTable MemoryMappedTable\n") == 2
