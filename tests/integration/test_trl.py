"""Tests that train.py has the labels and losses of TRL's SFTTrainer. Without TRL, those that it had are expected."""

import importlib.util
import json

import pytest

from data_loader import tokens_hash
from helpers import program

trl = program("benchmarks/losses_of_trl.py")
OTHER_PROCESSOR = 1e-5  # it may add in another order; five settings of one processor differed by up to 1.4e-6


@pytest.mark.promise("Your own data: the labels and losses of TRL")
@pytest.mark.parametrize("case", trl.CASES)
def test_labels_and_losses_are_those_of_trl(case, train, workplace):
    expected, tolerance = json.loads(trl.SAVED.read_text())[case], OTHER_PROCESSOR
    if importlib.util.find_spec("trl"):
        expected, tolerance = trl.train_with_trl(case, workplace / "trl"), 2e-6  # 4 bits of a loss near 7
    flags = trl.prepare(case, workplace / "trl")
    assert tokens_hash(trl.load_rows(flags)) == expected["tokens"]
    losses = train(f"trl_{case}", *flags, TRAIN_SIZE="all").step_losses
    assert losses == pytest.approx(expected["losses"], abs=tolerance, rel=0)
    assert len(losses) == 16 and losses[-1] < losses[0] - 0.5
