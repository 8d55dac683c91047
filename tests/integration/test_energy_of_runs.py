"""Tests of the energy in the records of real training runs, with a stub for NVML. The training is on the CPU."""

import pytest

from helpers import REPOSITORY
from stub_nvml import WATTS
from workbench import patch_call

STUB = f"""
sys.path.insert(0, {str(REPOSITORY / "tests")!r})
from stub_nvml import StubNvml, use_stub
use_stub(StubNvml(("GPU-0", "GPU-1")), "GPU-" + os.environ.get("RANK", "0"))
"""
STOP_IN_STEP_9 = patch_call("transformers.Trainer.training_step", 9, "os.kill(os.getpid(), signal.SIGUSR1)")
STEPS = ("--max_steps", 16, "--eval_steps", 12, "--eval_strategy", "steps")
RUN = {"ranks": 2, "SAVE_STRATEGY": "no", "GRAD_ACC": 1}


def mean_power(record: dict) -> float:
    """Return the power of a GPU, computed from the energy and the rates in a record."""
    train, energy = record["train"], record["energy"]
    seconds = train["steady_steps"] / train["steady_steps_per_second"]
    return energy["steady_joules_sum"] / seconds / len(energy["steady_joules"])


@pytest.mark.promise("energy adds up over stops, and is empty with a reason where it cannot be known")
def test_a_stopped_and_resumed_job_adds_up_its_energy(train):
    stopped = train("energy", *STEPS, patch=STUB + STOP_IN_STEP_9, code=75, **RUN).record
    finished = train("energy", *STEPS, patch=STUB, **RUN).record
    for record in (stopped, finished):
        assert mean_power(record) == pytest.approx(1.5 * WATTS, rel=0.2)
        energy = record["energy"]
        assert energy["mean_watts"] == pytest.approx(1.5 * WATTS, rel=0.2)
        first, second = energy["steady_joules"]
        assert second == pytest.approx(2 * first, rel=0.2), "GPU 1 draws twice as much"
        questions = record["train"]["steady_steps"] * record["train_size"] / record["steps_per_epoch"]
        assert energy["joules_per_question"] == pytest.approx(energy["steady_joules_sum"] / questions, rel=0.01)
        assert energy["kwh"] * 3.6e6 > energy["steady_joules_sum"], "the job also warmed up and evaluated"
        assert not {name for name in record["missing"] if name.startswith("energy")}
    assert finished["train"]["steady_steps"] > stopped["train"]["steady_steps"] > 0
    trained = finished["train"]["runtime_s"] - stopped["train"]["runtime_s"]
    second_attempt = (finished["energy"]["kwh"] - stopped["energy"]["kwh"]) * 3.6e6
    assert second_attempt > 0.95 * 3 * WATTS * trained
    assert finished["hardware"]["gpu_power_limit_w"] == 300
    (activity,) = finished["gpu_activity"]
    assert activity["seconds"] >= 0.1
    assert activity["dram_percent"] == 44
