"""estimate_memory.py as a command; its numbers: tests/unit/test_estimate_memory.py."""

import re

import pytest

from estimate_memory import GIB


def test_the_verdict_of_a_model_without_download(command):
    flags = ["--model_name", "bigscience/bloom-7b1", "--gpus", "2", "--gpu_memory", "32", "--cpu_memory", "96"]
    done = command("estimate_memory.py", *flags)
    assert done.code == 0, done
    assert done.stdout.startswith("bigscience/bloom-7b1: 7,069,016,064 parameters, fp16, micro batch 4 x 512 tokens")
    rows = {line[:24].strip(): line[24:].split() for line in done.stdout.splitlines()}
    assert float(rows["parameters"][0]) == pytest.approx(4 * 7_069_016_064 / GIB, abs=0.01)
    assert "GiB needed, 32 GiB there: does not fit" in done.stdout
    of_python = float(rows["Python, libraries"][1])
    needed = re.search(r"one node: ([0-9.]+) GiB needed, 96 GiB there: fits", done.stdout)
    weights = 2 * 4 * 7_069_016_064 / GIB  # each rank loads them for itself
    assert float(needed[1]) == pytest.approx(weights + 2 * of_python, abs=0.1)
    assert "Not counted: CUDA context" in done.stdout


def test_a_mistake_is_one_line(command):
    done = command("estimate_memory.py", "--gpus", "3", "--nodes", "2")
    assert (done.code, done.stdout) == (2, "")
    assert done.log == "error: --gpus: 3 GPUs do not spread over 2 nodes; give a multiple of the nodes\n"
