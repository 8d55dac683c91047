"""Compare the one-liners of docs/one-liners.md with the values that the report reads from the same run."""

import math
import re
import subprocess
from pathlib import Path

import pytest

from helpers import REPOSITORY
from job.memory_logs import memory_log_paths, read_gpu_log
from reporting.metrics import METRICS
from reporting.runs import Missing, read_run

METRIC_OF_TITLE = {
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
PER_GPU = "Peak of each GPU (MiB)"
IN_USE = "CPU in use, mean and largest value (%)"


def documented() -> dict[str, str]:
    """Map the line above each command to the command."""
    text = (REPOSITORY / "docs" / "one-liners.md").read_text()
    return dict(re.findall(r"^(\S.*):\n\n```bash\n(.*)\n```$", text, re.MULTILINE))


def shell(command: str, folder: Path, **variables: str) -> list[float]:
    environment = {"PATH": "/usr/bin:/bin"} | variables
    done = subprocess.run(
        ["bash", "-c", command], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    assert not done.stderr, done.stderr
    return [float(word) for word in done.stdout.split()]


def check_one_liners(record: Path) -> None:
    """Check that each one-liner gives the report's value for a run with one GPU log."""
    run, lines = read_run(record), documented()
    assert set(lines) == {*METRIC_OF_TITLE, PER_GPU, IN_USE}
    for title, metric in METRIC_OF_TITLE.items():
        found = shell(lines[title], run.folder, JOB=run.job_id)
        expected = METRICS[metric].read(run)
        if isinstance(expected, Missing):
            assert not found, title
        else:
            assert math.isclose(found[-1], expected, rel_tol=1e-3), (title, found, expected)
        if metric == "eval_loss":
            assert len(found) == len(run.record.eval)
    numbers = shell(lines[PER_GPU], run.folder, JOB=run.job_id)
    (gpu,), (cpu,) = memory_log_paths(run.folder, run.job_id)
    log = read_gpu_log(gpu)
    assert numbers[1::2] == [log.peak(name) for name in log.names()]
    samples = [line.split() for line in cpu.read_text().splitlines() if not line.startswith("#")]
    percent = [float(sample[1]) for sample in samples if sample]
    assert shell(lines[IN_USE], run.folder, JOB=run.job_id) == [
        pytest.approx(sum(percent) / len(percent), rel=1e-3),
        max(percent),
    ]
