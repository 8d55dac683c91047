"""--profile: the traces and the breakdown that two real ranks leave."""

import gzip
import json

import pytest

from helpers import run
from training.profiling import PHASES, PROFILED_STEPS


def test_a_profile_of_two_ranks(workplace):
    flags = ["--max_steps", 8, "--profile", "--save_strategy", "no", "--deepspeed", "ds_configs/zero1.json"]
    finished = run(workplace, "profiled", *flags, processes=2, launcher="launch.py", BATCH_SIZE=2, GRAD_ACC=2)
    ranks = finished.record["profile"]
    assert len(ranks) == 2
    for number, found in enumerate(ranks):
        assert found["steps"] == PROFILED_STEPS
        parts = [found[name] for name in (*PHASES, "communication", "other")]
        assert sum(parts) == pytest.approx(found["seconds_per_step"], abs=1e-4)
        assert min(parts) >= 0
        assert all(found[name] > 0 for name in ("forward", "backward", "optimizer", "communication"))
        trace = json.loads(gzip.decompress((finished.folder / found["trace"]).read_bytes()))
        names = {event.get("name") for event in trace["traceEvents"]}
        assert found["trace"].endswith(f"rank_{number}.json.gz")
        assert {"forward", "backward", "aten::mm", "gloo:all_reduce"} <= names
    assert "profile of a step" in finished.log
    # steps 4 to 6 are left out of the steady rate
    assert finished.record["train"]["steady_steps"] == 2


def test_a_run_that_is_too_short_for_a_profile_says_so(workplace):
    finished = run(workplace, "too_short", "--max_steps", 4, "--profile", "--save_strategy", "no", NUM_EPOCHS=1)
    assert finished.record["profile"] is None
    assert finished.record["missing"]["profile"] == "too few steps: it is taken of steps 4 to 6"
    assert not (workplace / "profile").exists() or not (workplace / "profile" / "too_short").exists()
