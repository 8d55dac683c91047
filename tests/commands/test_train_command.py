"""Tests of errors that evaluate.py reports before it loads a model. tests/unit and tests/faults have more of them."""

import pytest

from helpers import the_error

WHOLE = "evaluation holds the whole model on every rank"
MERGED = "has no effect on a saved model, whose weights contain the adapters; leave it out"


@pytest.mark.parametrize(
    ("flag", "value", "what"),
    [("--deepspeed", "a.json", WHOLE), ("--tensor_parallel", "2", WHOLE), ("--lora_rank", "8", MERGED)],
)
def test_evaluate_py_rejects_flags_that_it_would_ignore(command, flag, value, what):
    finished = command("evaluate.py", flag, value)
    assert finished.code == 2, finished
    assert the_error(finished.err).startswith(f"error: {flag}: {what}")
