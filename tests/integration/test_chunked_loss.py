"""The loss without logits is the loss with them, however the model is spread over the ranks."""

import pytest

from helpers import Finished
from runs import CHUNKED, uses
from test_strategies import TOLERANCE


@uses(*CHUNKED)
def test_every_epoch_has_the_loss_of_the_full_logits(run: Finished, table):
    plain = table("plain")
    assert run.effective("loss") == "chunked"
    assert plain.effective("loss") == "full"
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCE, rel=0), run
    assert run.record["train"]["loss_mean"] == pytest.approx(plain.record["train"]["loss_mean"], abs=10 * TOLERANCE)
