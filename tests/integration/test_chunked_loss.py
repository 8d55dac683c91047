"""The loss without logits is the loss with them, however the model is spread over the ranks; and also compiled."""

import pytest

from helpers import Finished, run
from runs import CHUNKED, COMPILE, COMPILED, uses
from test_strategies import TOLERANCE


@uses(*CHUNKED)
def test_every_epoch_has_the_loss_of_the_full_logits(run: Finished, table):
    plain = table("plain")
    assert run.effective("loss") == "chunked"
    assert plain.effective("loss") == "full"
    assert run.losses == pytest.approx(plain.losses, abs=TOLERANCE, rel=0), run
    assert run.record["train"]["loss_mean"] == pytest.approx(plain.record["train"]["loss_mean"], abs=10 * TOLERANCE)


@uses(*COMPILED)
def test_compiled_training_has_the_same_losses(run: Finished, table):
    assert run.effective("compiled") is True
    assert run.losses == pytest.approx(table("plain").losses, abs=TOLERANCE, rel=0), run


def test_without_a_compiler_the_training_is_eager_and_says_so(workplace):
    settings = COMPILE | {"TRAIN_SIZE": 16, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}
    none = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": workplace / "nothing_compiled"}
    eager = run(workplace, "no_compiler", **none, **settings)
    assert eager.record["knobs"]["compiled"] == {"requested": True, "effective": False}
    assert "inductor cannot compile on " in eager.log
