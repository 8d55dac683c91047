"""Tests of what commands do before they import PyTorch: only a process of its own shows what a library has read."""

import pytest

EXERCISES = [f"../exercises/{name}.py" for name in ("data_parallel", "shard", "pipeline", "ring")]
PROGRAMS = ["train.py", "evaluate.py", "ask.py", *EXERCISES]


@pytest.mark.parametrize("program", PROGRAMS)
def test_without_a_gpu_the_threads_of_openmp_spin_briefly(command, program):
    """By default they spin for milliseconds, and a run next to busy programs is many times slower."""
    finished = command(program, "--help", OMP_DISPLAY_ENV="verbose")
    assert "GOMP_SPINCOUNT = '1000'" in finished.err, finished


def test_the_users_own_choice_of_waiting_threads_stays(command):
    finished = command("ask.py", "--help", OMP_DISPLAY_ENV="verbose", OMP_WAIT_POLICY="active")
    assert "GOMP_SPINCOUNT = '30000000000'" in finished.err, finished
