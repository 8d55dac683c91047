"""Energy, power and activity of GPUs in the report and on the page of a class. All numbers are made up."""

from types import SimpleNamespace

import pytest

from report_files import add_gpu_run, add_run, find_run
from reporting.classroom_page import render_class
from reporting.classroom_runs import ClassReader
from reporting.metrics import metric_value
from reporting.render import describe_gpu_hours
from reporting.runs import Missing, ReportedRun, find_runs

ENERGY = ["kwh", "joules_per_question", "joules_per_1000_tokens", "mean_watts", "power_share"]
STEADY = ENERGY[1:]
ACTIVITY = ["sm_activity", "tensor_activity", "dram_activity"]


def reasons(run: ReportedRun) -> dict[str, str]:
    """Return the reason for each missing value. A metric with a value is not in it."""
    values = {name: metric_value(name, run) for name in [*ENERGY, *ACTIVITY]}
    return {name: value.reason for name, value in values.items() if isinstance(value, Missing)}


def test_values_of_a_run(tmp_path):
    """Power is 490 of 700 W. The activity is the mean over the two nodes."""
    nodes = [
        {"seconds": 0.4, "sm_percent": 60.0, "tensor_percent": 20.0, "dram_percent": 30.0},
        {"seconds": 0.5, "sm_percent": 70.0, "tensor_percent": 10.0, "dram_percent": 40.0},
    ]
    add_gpu_run(tmp_path, "baseline", "1", gpus=2, gpu_activity=nodes)
    run = find_run(tmp_path)
    assert {name: metric_value(name, run) for name in ENERGY + ACTIVITY} == pytest.approx(
        {
            "kwh": 0.4,
            "joules_per_question": 320,
            "joules_per_1000_tokens": 1680,
            "mean_watts": 490,
            "power_share": 70,
            "sm_activity": 65,
            "tensor_activity": 15,
            "dram_activity": 35,
        }
    )


SHARED = "2 ranks share a GPU"
KILLED = "attempt 1 was killed before it recorded its energy"
FEW_STEPS = "too few steps after the warm-up"
OLD = "NVML measures it on Hopper and newer GPUs"
NOTHING = {"energy": None, "gpu_activity": None}


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"missing": {"energy": SHARED}, "energy": None}, dict.fromkeys(ENERGY, SHARED)),
        ({"missing": {"energy.kwh": KILLED}, "energy__kwh": None}, {"kwh": KILLED}),
        (
            {"missing": {"energy.steady_joules": FEW_STEPS}, "energy": {"kwh": 0.2}},
            dict.fromkeys(STEADY, FEW_STEPS),
        ),
        ({"hardware__gpu_power_limit_w": None}, {"power_share": "not measured"}),
        ({"missing": {"gpu_activity": OLD}, "gpu_activity": None}, dict.fromkeys(ACTIVITY, OLD)),
        (
            {"status": "failed", "exit_code": 1, **NOTHING},
            dict.fromkeys(ENERGY + ACTIVITY, "the run's status is failed"),
        ),
        (NOTHING, dict.fromkeys(ENERGY + ACTIVITY, "not measured")),
        ({"hardware__gpus": 0, **NOTHING}, dict.fromkeys(ENERGY + ACTIVITY, "no GPU")),
        ({"hardware__gpus": 0, "status": "failed", **NOTHING}, dict.fromkeys(ENERGY + ACTIVITY, "no GPU")),
    ],
    ids=["shared GPU", "lost attempt", "few steps", "no limit", "old GPU", "failed", "old record", "CPU",
         "failed on the CPU"],
)  # fmt: skip
def test_a_missing_value_has_its_reason(tmp_path, changes, expected):
    add_gpu_run(tmp_path, "baseline", "1", **changes)
    assert reasons(find_run(tmp_path)) == expected


def test_kwh_are_next_to_gpu_hours(tmp_path):
    """The number of runs is there only if the energy of a run is not known. Without any energy, there are no kWh."""
    add_gpu_run(tmp_path, "baseline", "1")
    add_gpu_run(tmp_path, "baseline", "2", gpus=2)
    runs = find_runs([tmp_path])
    assert describe_gpu_hours(runs) == "1.5 in 2 runs; 0.6 kWh"
    add_gpu_run(tmp_path, "baseline", "3", status="failed", exit_code=1, **NOTHING)
    assert describe_gpu_hours(find_runs([tmp_path])) == "2 in 3 runs; 0.6 kWh (2 of 3 runs)"
    assert describe_gpu_hours([run for run in find_runs([tmp_path]) if run.job_id == "3"]) == "0.5 in 1 run"
    add_run(tmp_path, "baseline", "4")
    described = describe_gpu_hours(find_runs([tmp_path]))
    assert described == "2 in 3 runs, no value for 1 (no GPU); 0.6 kWh (2 of 4 runs)"


def test_the_page_of_a_class_shows_kwh_if_any_are_known(tmp_path, monkeypatch):
    monkeypatch.setattr(
        "job.end_of_job.subprocess.run", lambda *_, **__: SimpleNamespace(stdout="", returncode=0)
    )  # squeue
    for name, energy in (("alice", {}), ("bjarne", NOTHING)):
        add_gpu_run(tmp_path / name, "baseline", "1", **energy)
    pages = {}
    for names in (["alice", "bjarne"], ["bjarne"]):
        reader = ClassReader([tmp_path / name for name in names], ["baseline"])
        pages[len(names)] = render_class(reader, reader.read(), False, None)
    assert "<p>1 in 2 runs; 0.2 kWh (1 of 2 runs)</p>" in pages[2] and "kWh: energy" in pages[2]
    assert "<p>0.5 in 1 run</p>" in pages[1] and "kWh" not in pages[1]
