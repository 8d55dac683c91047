"""The exercise of docs/cost.md: its records agree with their logs, and the page and the solution with both."""

import itertools
from collections import defaultdict
from datetime import datetime

import pytest

from helpers import EXPERIMENT_SCRIPTS, REPOSITORY, program
from records.schema import Record, read_record
from text_checks.experiment_index import NOT_TAUGHT, gpu_bill

FOLDER = REPOSITORY / "exercises" / "cost"
PAGE = (REPOSITORY / "docs" / "cost.md").read_text(encoding="utf-8")
SOLUTION = (REPOSITORY / "exercises" / "solution" / "cost.md").read_text(encoding="utf-8")
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


@pytest.mark.parametrize("run", RUNS)
def test_the_energy_of_a_record_is_the_integral_of_its_log(run):
    found, curves = record(run), power(run)
    assert len(curves) == found.world_size == found.hardware.gpus
    if found.status == "failed":
        assert (found.energy, found.exit_code) == (None, 3)
        return
    assert sum(map(integral, curves.values())) / JOULES_PER_KWH == pytest.approx(found.energy.kwh, rel=0.01)


@pytest.mark.parametrize("run", RUNS)
def test_each_file_says_that_no_gpu_was_measured(run):
    found = record(run)
    assert found.run_name == "computed by a power model: no GPU was measured"
    assert found.hardware.gpu.startswith("modelled GPU")
    assert found.hardware.gpu in (FOLDER / "gpu_memory" / f"gpu_memory_log_{run}.csv").read_text()


@pytest.mark.parametrize("run", [run for run in RUNS if record(run).energy])
def test_the_numbers_of_a_record_agree_with_each_other(run):
    found = record(run)
    train, energy = found.train, found.energy
    questions = train.steady_steps * found.train_size / found.steps_per_epoch
    assert energy.steady_joules_sum == pytest.approx(sum(energy.steady_joules))
    assert energy.joules_per_question == pytest.approx(energy.steady_joules_sum / questions, rel=1e-3)
    assert energy.joules_per_1000_tokens == pytest.approx(1000 * energy.steady_joules_sum / train.real_tokens, rel=1e-3)
    watts = energy.joules_per_question * train.steady_samples_per_second / found.world_size
    assert energy.mean_watts == pytest.approx(watts, rel=1e-3)
    assert energy.mean_watts < found.hardware.gpu_power_limit_w


# The solution and the page


def test_the_solution_shows_the_numbers_of_the_records():
    rows = {row[0].strip(): row[1:] for line in SOLUTION.splitlines() if len(row := line.strip("|").split("|")) == 7}
    energies = {run: record(run).energy.kwh for run in RUNS if record(run).energy}
    # awk of the page adds up 10 s x W
    energies["B"] = sum(10 * watts for curve in power("B").values() for _, watts in curve) / JOULES_PER_KWH
    for run in RUNS:
        gpus, utilisation, _, kwh, joules, ratio = (cell.strip() for cell in rows[run])
        found = record(run)
        assert int(gpus) == found.world_size
        assert float(kwh.split(",")[0]) == pytest.approx(energies[run], rel=0.01)
        assert float(ratio) == pytest.approx(energies[run] / energies["E"], rel=0.01)
        if found.energy:
            assert float(joules) == found.energy.joules_per_question
            assert float(utilisation) == found.callbacks["avg_gpu_util_%"]
        else:
            assert not joules


def test_the_solution_applies_the_formula_of_two_gpus():
    one, two = record("E"), record("D")
    efficiency = two.train.steady_samples_per_second / (2 * one.train.steady_samples_per_second)
    ratio = two.energy.mean_watts / one.energy.mean_watts / efficiency
    assert f"= {efficiency:.2f}." in SOLUTION and f"/ 0.85 = {ratio:.3f}" in " ".join(SOLUTION.split())
    assert two.energy.joules_per_question / one.energy.joules_per_question == pytest.approx(ratio, rel=1e-3)
    # The second form of the formula, with the power of the model
    model = program("exercises/cost/write_runs.py")
    waiting = 1 + (1 / efficiency - 1) * model.WAITING / model.COMPUTING
    assert waiting == pytest.approx(ratio, rel=1e-3)


def test_the_page_computes_with_the_numbers_that_it_names():
    text = " ".join(PAGE.split())
    hours, kwh = 1_082_990, 433_196
    taught = [
        script for script in EXPERIMENT_SCRIPTS if script.parent.parts[len(REPOSITORY.parts) + 1] not in NOT_TAUGHT
    ]
    bill = gpu_bill(taught)[2]
    own = bill * 0.3
    for sentence in (
        f"{hours:,} GPU-hours",
        f"{kwh:,} kWh / {hours:,} h is {1000 * kwh / hours:.0f} W",
        f"24.7 t / {kwh:,} kWh is {24.7e6 / kwh:.0f} g per kWh",
        f"at most {bill} GPU-hours",
        f"at most {own:.0f} kWh. BLOOM took about {round(kwh / own, -2):,.0f} times as much",
        f"1/0.9³ = {1 / 0.9**3:.2f} times as large",
        f"1/0.9² = {1 / 0.9**2:.2f} times as large",
        f"at most {100 / 0.9 - 100:.0f} % faster",
        f"this is {1 + 2 * 80 / 320:.2f} times. The mean power falls to {(320 + 2 * 80) / 3:.0f} W",
        f"two GPUs need {1 / 0.85:.2f} times",
        f"3 x 160 / 320 = {3 * 160 / 320:.2f} times",
        f"1 / 0.7 = {1 / 0.7:.2f} times the energy. The result comes 8 x 0.7 = {8 * 0.7:.1f} times earlier",
    ):
        assert sentence in text, sentence


def test_the_page_names_the_power_of_the_model():
    model = program("exercises/cost/write_runs.py")
    power = (
        f"({model.COMPUTING} W while the GPU computes, {model.WAITING} W while NCCL waits, {model.IDLE} W otherwise)"
    )
    assert power in PAGE
    assert f"after {model.HANG_TIMEOUT} seconds" in PAGE and f"every {model.INTERVAL} seconds" in PAGE
    docstring = model.__doc__
    assert all(f"{watts} W" in docstring for watts in (model.LIMIT, model.COMPUTING, model.WAITING, model.IDLE))
