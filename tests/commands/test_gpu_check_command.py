"""gpu_check.py and preflight.py as commands that end at once."""

import re


def test_without_a_gpu_it_says_so_in_one_line(command):
    done = command("gpu_check.py")
    assert done.code == 3
    (line,) = done.error_lines
    assert line.startswith("error: GPU: PyTorch sees none on ")
    assert line.endswith("make gpu-check FLAGS=--cpu")
    assert not list(done.folder.iterdir())


def test_a_row_that_is_none_is_one_line_with_exit_code_2(command):
    done = command("gpu_check.py", "--rows", "zero9")
    assert done.code == 2
    (line,) = done.error_lines
    assert line.startswith("error: --rows: invalid choice: 'zero9' (choose from ")


def test_a_wrong_flag_of_preflight_is_one_line_with_exit_code_2(command):
    finished = command("preflight.py", "--timeout", "0")
    assert (finished.code, finished.stdout) == (2, ""), finished
    assert re.fullmatch(r"error: --timeout: 0 is too small; .+\n", finished.log), finished
