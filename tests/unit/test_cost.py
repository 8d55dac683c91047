"""The exercise of docs/cost.md: its records agree with their logs."""

import itertools
from collections import defaultdict
from datetime import datetime

import pytest

from helpers import REPOSITORY, program
from records.schema import Record, read_record

FOLDER = REPOSITORY / "exercises" / "cost"
RUNS = ["A", "B", "C", "D", "E"]
JOULES_PER_KWH = 3.6e6


def record(run: str) -> Record:
    return read_record(FOLDER / "results" / f"{run}.json")


def power(run: str) -> dict[str, list[tuple[datetime, float]]]:
    """Return the samples of each GPU in the log, as (time in UTC, W)."""
    head, *lines = (FOLDER / "gpu_memory" / f"gpu_memory_log_{run}.csv").read_text().splitlines()
    assert head.split(", ")[5:] == ["power.draw [W]", "utilization.gpu [%]"]
    curves = defaultdict(list)
    for line in lines:
        time, gpu, _, _, _, watts, _ = line.split(", ")
        curves[gpu].append((datetime.fromisoformat(f"{time.replace('/', '-')}+00:00"), float(watts)))
    return curves


def integral(curve: list[tuple[datetime, float]]) -> float:
    """Return the joules under a curve, by the trapezoidal rule."""
    pairs = itertools.pairwise(curve)
    return sum((after - before).total_seconds() * (low + high) / 2 for (before, low), (after, high) in pairs)


def test_the_script_writes_the_runs_that_ship_with_the_page(tmp_path):
    program("exercises/cost/write_runs.py").write_runs(tmp_path)
    written = {path.relative_to(tmp_path): path.read_text() for path in tmp_path.rglob("*.*") if path.is_file()}
    shipped = {path.relative_to(FOLDER): path.read_text() for path in FOLDER.glob("*/*.*") if path.suffix != ".pyc"}
    assert len(written) == 3 * len(RUNS)
    assert written == shipped, "run python exercises/cost/write_runs.py and commit"


@pytest.mark.promise("cost: its commands work, and the energy of its modelled runs follows from their logs")
@pytest.mark.parametrize("run", RUNS)
def test_the_energy_of_a_record_is_the_integral_of_its_log(run):
    found, curves = record(run), power(run)
    assert len(curves) == found.world_size == found.hardware.gpus
    if found.status == "failed":
        assert (found.energy, found.exit_code) == (None, 3)
        return
    train, energy = found.train, found.energy
    assert sum(map(integral, curves.values())) / JOULES_PER_KWH == pytest.approx(energy.kwh, rel=0.01)
    # The numbers of the record also agree with each other
    questions = train.steady_steps * found.train_size / found.steps_per_epoch
    assert energy.steady_joules_sum == pytest.approx(sum(energy.steady_joules))
    assert energy.joules_per_question == pytest.approx(energy.steady_joules_sum / questions, rel=1e-3)
    assert energy.joules_per_1000_tokens == pytest.approx(1000 * energy.steady_joules_sum / train.real_tokens, rel=1e-3)
    watts = energy.joules_per_question * train.steady_samples_per_second / found.world_size
    assert energy.mean_watts == pytest.approx(watts, rel=1e-3)
    assert energy.mean_watts < found.hardware.gpu_power_limit_w


@pytest.mark.promise("cost: its commands work, and the energy of its modelled runs follows from their logs")
@pytest.mark.parametrize("run", RUNS)
def test_each_file_says_that_no_gpu_was_measured(run):
    found = record(run)
    assert found.run_name == "computed by a power model: no GPU was measured"
    assert found.hardware.gpu.startswith("modelled GPU")
    assert found.hardware.gpu in (FOLDER / "gpu_memory" / f"gpu_memory_log_{run}.csv").read_text()
