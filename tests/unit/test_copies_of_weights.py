"""Tests of the weights before they are saved: that they are finite, and the sum that compares their copies."""

from types import SimpleNamespace

import pytest
import torch

from guard import silent_faults
from guard.run_frame import Run
from guard.silent_faults import check_weights, sum_of_bits


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("size", [0, 1, 3, 4, 5])
def test_the_sum_of_bits_changes_with_a_bit_and_not_with_the_place_in_memory(dtype, size):
    buffer = torch.randn(16).to(dtype)
    for start in range(3):  # weights of DeepSpeed lie somewhere in one buffer
        part = buffer[start : start + size]
        expected = int(sum_of_bits(part.clone()))
        assert int(sum_of_bits(part)) == expected
        if size:
            changed = part.clone().view(torch.uint8)
            changed[-1] ^= 1  # the lowest bit of the last octet
            assert int(sum_of_bits(changed.view(dtype))) != expected
    assert int(sum_of_bits(torch.ones(4, 3, dtype=dtype).T)) == int(sum_of_bits(torch.ones(12, dtype=dtype)))


def test_one_number_on_any_rank_that_is_not_finite_keeps_the_weights_from_being_saved(refusal, monkeypatch):
    """The last number of the last weight counts, and so do the weights of the other ranks."""
    model = torch.nn.Linear(2, 2)
    check_weights(model, 4)
    model.bias.data[-1] = torch.nan
    line = refusal(check_weights, model, 4, code=1)
    assert line.startswith("error: weights: are not finite after step 4, ")
    monkeypatch.setattr(silent_faults, "max_over_ranks", lambda own: 1)
    assert refusal(check_weights, torch.nn.Linear(2, 2), 4, code=1) == line


def test_weights_are_checked_at_the_end_of_a_training_without_checkpoints(refusal):
    """With tensor parallelism there is none, and the model is saved all the same."""
    stop = SimpleNamespace(save_and_exit_if_asked=lambda *_: None)
    record, args = SimpleNamespace(content={"callbacks": {}}), SimpleNamespace(report_to=[])
    trainer = SimpleNamespace(model=torch.nn.Linear(2, 2), state=SimpleNamespace(global_step=4))
    trainer.model.bias.data[-1] = torch.nan
    run = SimpleNamespace(args=args, job_id="7", record=record, stop=stop, energy=None)
    assert "are not finite after step 4, " in refusal(Run.end_training, run, trainer, code=1)
