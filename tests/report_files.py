"""Made-up runs for the tests of the report: a record and memory logs that a test can change."""

import copy
import json
from pathlib import Path

from helpers import REPOSITORY
from reporting.definitions import load_definitions
from reporting.metrics import Cell
from reporting.runs import ReportedRun, find_runs
from reporting.tables import Table, build_tables

RUNS = REPOSITORY / "tests" / "data" / "runs"
RUNS_OF_1_0_0 = REPOSITORY / "tests" / "data" / "runs_of_1.0.0"  # files that version 1.0.0 wrote
SAMPLE = RUNS / "experiments" / "deepspeed-single-gpu" / "zero_1" / "results" / "102.json"
GPU_HEADER = "timestamp, index, name, memory.used [MiB], memory.total [MiB], power.draw [W], utilization.gpu [%]"
OLD_GPU_HEADER = GPU_HEADER.partition(", power")[0]  # of version 1.0.0
CPU_HEADER = "# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)"


def gpu_log(*used: float, gpus: int = 1, step: int = 5) -> str:
    """Return a GPU log with one value per time step, which is the same for all GPUs."""
    lines = [
        f"2026/11/20 22:{i * step // 60:02d}:{i * step % 60:02d}.000, {gpu}, Tesla V100-SXM2-32GB, {mib}, 32768, "
        "71.23, 98"
        for i, mib in enumerate(used)
        for gpu in range(gpus)
    ]
    return "\n".join([GPU_HEADER, *lines]) + "\n"


def cpu_log(*real: float, step: int = 5) -> str:
    return "\n".join([CPU_HEADER, *(f"{i * step:.3f} 99.0 {mib:.3f} 9999.0" for i, mib in enumerate(real))]) + "\n"


def add_run(
    top: Path,
    experiment: str,
    job_id: str,
    /,
    gpu: str | bytes | tuple[float, ...] | None = "",
    cpu: str | bytes | None = "",
    **changes: object,
) -> Path:
    """Write a run below `top`/experiments. Changes such as settings__labels="answer" go into the record.

    gpu, cpu: content of the log. None writes no log, and "" a valid log. For a GPU log, a tuple gives its samples.
    """
    folder = top / "experiments" / experiment
    record = copy.deepcopy(json.loads(SAMPLE.read_text()))
    record |= {"experiment": f"experiments/{experiment}", "job_id": job_id}
    record["started"] = f"2026-11-20T10:00:{int(job_id) % 60 if job_id.isdigit() else 0:02d}+00:00"
    record["train"]["runtime_s"] = 15
    for path, value in changes.items():
        *parents, last = path.split("__")
        inner = record
        for key in parents:
            inner = inner[key]
        inner[last] = value
    if record["hardware"]["gpus"] and "hardware__gpus" not in changes:
        record["hardware"]["gpus"] = record["world_size"]
    write(folder / "results" / f"{job_id}.json", json.dumps(record))
    gpus = record["hardware"]["gpus"] or record["world_size"]
    gpu = gpu_log(*gpu) if isinstance(gpu, tuple) else gpu
    good = {"gpu": gpu_log(100, 900, 500, gpus=gpus), "cpu": cpu_log(10, 90, 50)}
    for kind, suffix, content in (("gpu", "csv", gpu), ("cpu", "txt", cpu)):
        if content is not None:
            write(folder / f"{kind}_memory" / f"{kind}_memory_log_{job_id}.{suffix}", content or good[kind])
    return folder


def add_gpu_run(top: Path, experiment: str, job_id: str, gpus: int = 1, **changes: object) -> Path:
    """Write a run of half an hour on GPUs with a limit of 700 W, with its energy and activity."""
    energy = {
        "steady_joules": [240_000.0] * gpus,
        "steady_joules_sum": 240_000.0 * gpus,
        "joules_per_question": 160.0 * gpus,
        "joules_per_1000_tokens": 840.0 * gpus,
        "mean_watts": 490.0,
        "kwh": 0.2 * gpus,
    }
    hardware = {"gpu": "NVIDIA H100 80GB HBM3", "gpus": gpus, "gpu_power_limit_w": 700.0, "cpu": "AMD EPYC", "cpus": 64}
    measured: dict[str, object] = {
        "world_size": gpus,
        "hardware": hardware,
        "finished": f"2026-11-20T10:30:{int(job_id) % 60:02d}+00:00",
        "missing": {},
        "energy": energy,
        "gpu_activity": [{"seconds": 0.4, "sm_percent": 62.0, "tensor_percent": 18.0, "dram_percent": 35.0}],
    }
    return add_run(top, experiment, job_id, **measured | changes)


def write(path: Path, content: str | bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content if isinstance(content, bytes) else content.encode())


def table(top: Path, name: str, all_runs: bool = False) -> Table:
    """Return the table `name` of the runs below a folder."""
    tables = build_tables(load_definitions(), find_runs([top]), all_runs)
    return next(found for found in tables if found.definition.id == name)


def cell(table: Table, label: str, column: str) -> Cell:
    row = next(row for row in table.rows if row.label == label)
    return row.cells[table.definition.columns.index(column)]


def find_run(top: Path) -> ReportedRun:
    """Return the only run below `top`."""
    (run,) = find_runs([top])
    return run
