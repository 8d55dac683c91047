"""Tests of a run's questions, batches and labels: --labels, --padding and --samples_per_gpu."""

import json
import math
import re

import pytest

from helpers import XQUAD, Finished
from runs import CHATS, LABELS, ODD, uses
from test_strategies import TOLERANCE


@uses("sequence_longest")
def test_padding_does_not_change_the_loss(run: Finished, table):
    assert (table("plain").effective("padding"), run.effective("padding")) == ("max_length", "longest")
    assert run.losses == pytest.approx(table("plain").losses, abs=TOLERANCE, rel=0)


@uses(*CHATS)
def test_loss_of_few_labels_is_independent_of_padding_batches_and_ranks(run: Finished, table):
    assert run.effective("label mode") == "answer"  # the default of chats
    assert run.losses == pytest.approx(table("chat_plain").losses, abs=TOLERANCE, rel=0), run
    assert run.losses[0] - run.losses[1] > 0.05, "equal losses prove nothing if the loss hardly moves"
    assert "Assistant:" in (run.output / "chat_template.jinja").read_text()  # the tokenizer had no template


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
def test_200_real_questions(run: Finished):
    """`runs.OTHERS` has the sizes of this run."""
    record = run.record
    assert record["status"] == "completed"
    assert (record["train_size"], record["eval_size"], len(run.losses)) == (200, 20, 1)
    assert record["train"]["loss_last"] < 7  # an untrained model has a loss of log(2048) = 7.62
    assert 0 <= record["exact_match"] <= record["f1"] <= 100


def test_a_run_takes_the_defaults_of_its_kind_of_data(train, bench):
    """SHOW prints answers without EM and F1, and the file with rows that were left out has those of both checks."""
    rows = [{"prompt": f"Question {i}?", "completion": f" answer {i}"} for i in range(40)]
    rows += [{"prompt": "", "completion": "a"}, {"prompt": "Too long?", "completion": " word" * 90}]
    bench.write("pairs.jsonl", "".join(json.dumps(row) + "\n" for row in rows))
    sizes = {"TRAIN_SIZE": "all", "EVAL_SIZE": "all", "MAX_LENGTH": 64, "NUM_EPOCHS": 1}
    run = train("pairs", DATASET="pairs.jsonl", SHOW=1, EM_F1="", BAD_ROWS="skip", **sizes)
    settings = run.record["settings"]
    assert (run.record["kind"], settings["labels"], settings["em_f1"]) == ("completion", "answer", False)
    assert run.effective("label mode") == "answer"
    assert re.search(r"^prompt: Question \d+\?\n  right answer: answer \d+\n  model's answer: ", run.out, re.MULTILINE)
    assert "exact_match" not in run.out
    assert "columns of pairs.jsonl: prompt, completion (kind: completion)" in run.out
    assert "training prompts: 32 of 33 available in pairs.jsonl" in run.out
    left_out = (run.folder / "results" / "pairs_left_out.txt").read_text().splitlines()
    assert [line.split(": ")[:2] for line in left_out] == [["pairs.jsonl", "line 41"], ["pairs.jsonl", "line 42"]]
    perplexity = float(re.search(r"'eval_perplexity': '([^']+)'", run.log)[1])
    assert perplexity == pytest.approx(math.exp(run.losses[-1]), rel=1e-2)


PRINT_TABLES = """
load = train.load_data
def load_data(*arguments):
    found = load(*arguments)
    print("TABLE", *(type(part.data).__name__ for part in found[:2]), flush=True)
    return found
train.load_data = load_data
"""


ZERO = {f"zero{stage}": ("--deepspeed", f"ds_configs/zero{stage}.json") for stage in range(4)}
METHODS = {"ddp": (), "fsdp": ("--fsdp",)} | ZERO


@pytest.fixture(scope="module")
def odd(train):
    return train("odd", **ODD)


@pytest.mark.parametrize("method", METHODS)
def test_without_padding_losses_and_evaluations_stay_the_same(train, table, odd, method):
    """accelerate repeats questions in the last step of an epoch, and, with 3 questions per rank, in the evaluation."""
    options = {"ranks": 2, "BATCH_SIZE": 2, "PADDING": "none", "ATTENTION": "sdpa", "LOSS": "chunked"} | ODD
    run = train(
        f"no_padding_{method}", *METHODS[method], "--per_device_eval_batch_size", 3, patch=PRINT_TABLES, **options
    )
    assert run.effective("padding") == "none"
    assert run.losses == pytest.approx(odd.losses, abs=TOLERANCE, rel=0)
    assert 0 < run.record["train"]["padding_tokens"] < run.record["train"]["real_tokens"] / 4
    # The tokens must be memory-mapped: all 87,599 questions of SQuAD must not be in memory
    assert run.log.count("TABLE MemoryMappedTable MemoryMappedTable\n") == 2
