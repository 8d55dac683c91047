"""Tests of errors that evaluate.py reports before it loads a model. tests/unit and tests/faults have more of them."""

import pytest

from helpers import the_error


@pytest.mark.parametrize(
    ("flag", "value"), [("--deepspeed", "a.json"), ("--tensor_parallel", "2"), ("--lora_rank", "8")]
)
def test_evaluate_py_rejects_flags_that_it_would_ignore(command, flag, value):
    finished = command("evaluate.py", flag, value)
    assert finished.code == 2, finished
    assert (
        the_error(finished.err) == f"error: {flag}: evaluation holds the whole saved model on every rank; leave it out"
    )
