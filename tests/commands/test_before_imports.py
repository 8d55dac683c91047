"""Tests of what commands do before they import PyTorch: only a process of its own shows what a library has read."""

import pytest

EXERCISES = [f"../exercises/{name}.py" for name in ("data_parallel", "shard", "pipeline", "ring")]
MORE = [pytest.param(program, {}, "1000", marks=pytest.mark.faults) for program in ("evaluate.py", "ask.py")]


@pytest.mark.parametrize(
    ("program", "choice", "count"),
    [
        *((program, {}, "1000") for program in ("train.py", *EXERCISES)),
        ("ask.py", {"OMP_WAIT_POLICY": "active"}, "30000000000"),
        *MORE,
    ],
)
def test_without_a_gpu_and_a_choice_of_the_user_the_threads_of_openmp_spin_briefly(command, program, choice, count):
    """By default they spin for milliseconds, and a run next to busy programs is many times slower."""
    finished = command(program, "--help", OMP_DISPLAY_ENV="verbose", **choice)
    assert f"GOMP_SPINCOUNT = '{count}'" in finished.err, finished
