"""Tests of input errors of gpu_check.py and preflight.py: the scripts end at once."""

import re

import pytest


@pytest.mark.parametrize(
    ("words", "code", "line"),
    [
        (["gpu_check.py"], 3, "error: GPU: PyTorch sees none on .*; .*make gpu-check FLAGS=--cpu"),
        (["gpu_check.py", "--rows", "zero9"], 2, "error: --rows: zero9 is unknown; choose from plain, .*"),
        (["preflight.py", "--timeout", "0"], 2, "error: --timeout: 0 is out of range, .+"),
    ],
)
def test_an_input_error_is_one_line_and_writes_nothing(command, words, code, line):
    done = command(*words)
    assert (done.code, done.out) == (code, ""), done
    (error,) = done.error_lines
    assert re.fullmatch(line, error)
    assert not list(done.folder.iterdir())
