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


def test_without_a_compiler_the_run_ends_before_its_training(workplace):
    none = {"CXX": "no-such-compiler", "TORCHINDUCTOR_CACHE_DIR": workplace / "nothing_compiled"}
    ended = run(workplace, "no_compiler", code=3, **none, **COMPILE)
    assert "error: --torch_compile: inductor cannot compile on " in ended.log
    assert not (workplace / "results" / "no_compiler.json").exists()
