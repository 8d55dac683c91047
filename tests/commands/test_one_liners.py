"""The documented one-liners and awk, against the report's own reading of the same files."""

import math
import re
import subprocess
from pathlib import Path

import pytest

from helpers import REPOSITORY
from report_files import RUNS
from reporting.memory_logs import logs_of, read_gpu_log
from reporting.metrics import METRICS
from reporting.runs import Missing, read_run

ALL_RECORDS = sorted(RUNS.rglob("results/*.json"))


def shell(command: str, folder: Path, **variables: str) -> list[float]:
    done = subprocess.run(["bash", "-c", command], cwd=folder, env={"PATH": "/usr/bin:/bin"} | variables,
                          capture_output=True, text=True, check=True)  # fmt: skip
    assert not done.stderr, done.stderr
    return [float(word) for word in done.stdout.split()]


def one_liners() -> dict[str, str]:
    """The line above each command in docs/one-liners.md -> the command."""
    text = (REPOSITORY / "docs" / "one-liners.md").read_text()
    return dict(re.findall(r"^(\S.*):\n\n```bash\n(.*)\n```$", text, re.MULTILINE))


LINES_OF_METRICS = {
    "Peak of any GPU (MiB)": "peak_gpu",
    "Minimum of any GPU (MiB)": "low_gpu",
    "Mean over time and GPUs (MiB)": "mean_gpu",
    "Peak (MiB)": "peak_cpu",
    "Mean (MiB)": "mean_cpu",
    "Train loss (mean over all steps)": "train_loss",
    "Eval loss, one line per epoch": "eval_loss",
    "Train samples per second, with evaluation and saving": "samples_per_second",
    "Train steps per second": "steps_per_second",
    "Train runtime (s)": "runtime",
    "Eval samples per second, of the last epoch": "eval_samples_per_second",
}


def test_every_one_liner_is_tested():
    assert set(one_liners()) == {*LINES_OF_METRICS, "Peak of each GPU (MiB)"}


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
@pytest.mark.parametrize("title", LINES_OF_METRICS)
def test_one_liner_gives_the_value_of_the_report(record, title):
    run = read_run(record)
    found = shell(one_liners()[title], run.folder, JOB=run.job_id)
    expected = METRICS[LINES_OF_METRICS[title]].read(run)
    if isinstance(expected, Missing):
        assert not found
    else:
        assert math.isclose(found[-1], expected, rel_tol=1e-3), (found, expected)
    if title.startswith("Eval loss"):
        assert len(found) == len(run.record.eval)


@pytest.mark.parametrize("record", ALL_RECORDS, ids=lambda path: path.stem)
def test_one_liner_per_gpu_gives_what_the_report_reads(record):
    run = read_run(record)
    numbers = shell(one_liners()["Peak of each GPU (MiB)"], run.folder, JOB=run.job_id)
    (gpu,), _ = logs_of(run.folder, run.job_id)
    log = read_gpu_log(gpu)
    assert numbers[1::2] == [log.peak(name) for name in log.names()]


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
