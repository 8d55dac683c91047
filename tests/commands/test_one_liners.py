"""The documented one-liners and awk, against the report's own reading of the same files; on a job: tests/slurm."""

import pytest

from one_liners import check_one_liners, shell
from report_files import RUNS
from reporting.memory_logs import logs_of
from reporting.runs import read_run

ALL_RECORDS = sorted(RUNS.rglob("results/*.json"))


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
def test_one_liners_give_the_values_of_the_report(record):
    check_one_liners(record)


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
def test_memory_agrees_with_awk(record):
    """A reading that shares nothing with the report's: other tools, other order."""
    run = read_run(record)
    (gpu,), (cpu,) = logs_of(run.folder, run.job_id)
    gpu_numbers = shell(f"sed 1d {gpu.name} | cut -d, -f4 | sort -n | awk '{{s+=$1; v[NR]=$1}} "
                        "END {print v[1], v[NR], s/NR}'", gpu.parent)  # fmt: skip
    assert gpu_numbers == pytest.approx([run.gpu.minimum, run.gpu.peak, run.gpu.mean], rel=1e-5)
    cpu_numbers = shell(f"sed 1d {cpu.name} | awk '{{s += $3; if ($3 > m) m = $3}} END {{print m, s/NR}}'", cpu.parent)
    assert cpu_numbers == pytest.approx([run.cpu.peak, run.cpu.mean], rel=1e-5)
