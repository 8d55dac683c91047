"""The memory logs that run beside a job: what is read of a good one, of a cut one, and whose they are."""

import os
import re
from pathlib import Path

import pytest

from reporting import files
from reporting.memory_logs import POINTS, MemoryLog, Samples, host_of, logs_of, read_cpu_log, read_gpu_log

GPU_HEADER = "timestamp, index, name, memory.used [MiB], memory.total [MiB]\n"
CPU_HEADER = "# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)\n"


def gpu_line(index: int, used: object, unit: str = "") -> str:
    return f"2026/01/31 10:00:00.123, {index}, NVIDIA H200, {used}{unit}, 143771{unit}\n"


def samples_of(log: MemoryLog) -> dict[str, list[float]]:
    """All samples of a short log."""
    return {name: [mib for _, mib in samples.points] for name, samples in log.samples.items()}


@pytest.mark.parametrize(
    ("text", "samples", "problems"),
    [
        (GPU_HEADER + gpu_line(0, 3) + gpu_line(0, 512), {"0": [3, 512]}, 0),
        (GPU_HEADER + gpu_line(0, 3, " MiB"), {"0": [3]}, 0),
        (GPU_HEADER + gpu_line(0, 1) + gpu_line(1, 2) + gpu_line(0, 3), {"0": [1, 3], "1": [2]}, 0),
        (GPU_HEADER + gpu_line(10, 1) + gpu_line(2, 2), {"10": [1], "2": [2]}, 0),
        (GPU_HEADER + gpu_line(0, 1) + GPU_HEADER + gpu_line(0, 2), {"0": [1, 2]}, 1),
        (GPU_HEADER + gpu_line(0, 1) + "\n" + gpu_line(0, 2), {"0": [1, 2]}, 0),
        (GPU_HEADER + gpu_line(0, "[N/A]") + gpu_line(1, 2), {"1": [2]}, 1),
        (GPU_HEADER + gpu_line(0, 700) + gpu_line(0, 900)[:44], {"0": [700]}, 1),
        (GPU_HEADER + gpu_line(0, 700)[:30] + GPU_HEADER + gpu_line(0, 5), {"0": [5]}, 1),
        (GPU_HEADER, {}, 0),
        ("", {}, 0),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", {}, 1),
        (GPU_HEADER + "\0\0\0\n" + gpu_line(0, 2), {"0": [2]}, 1),
    ],
    ids=["plain", "units", "two GPUs", "index 10", "header again", "empty line", "no value", "cut", "cut, restarted",
         "header only", "empty", "no driver", "zeros after a crash"],
)  # fmt: skip
def test_wild_gpu_logs(tmp_path, text, samples, problems):
    path = tmp_path / "gpu.csv"
    path.write_text(text)
    log = read_gpu_log(path)
    assert samples_of(log) == samples
    assert len(log.problems) == problems
    assert all(
        re.match(rf"{re.escape(str(path))}:\d+: (no sample|another header)", problem) for problem in log.problems
    )


@pytest.mark.parametrize("length", range(len(gpu_line(0, 700)) + 1))
def test_a_line_cut_anywhere_gives_its_value_or_none(tmp_path, length):
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_HEADER + gpu_line(0, 700)[:length])
    assert samples_of(read_gpu_log(path)) in ({}, {"0": [700]})


@pytest.mark.parametrize(
    ("text", "samples", "problems"),
    [
        (CPU_HEADER + " 0.0 10.0 100.5 4000.0\n 1.0 0.0 99.5 4000.0\n", [100.5, 99.5], 0),
        (CPU_HEADER + " 0.0 10.0 100.5 4000.0\n 1.0 0.0 99", [100.5], 1),
        (CPU_HEADER + " 0.0 10.0 1.0 4000.0\n" + CPU_HEADER + " 0.0 10.0 2.0 4000.0\n", [1, 2], 1),
        (CPU_HEADER, None, 0),
        ("", None, 0),
    ],
    ids=["plain", "cut", "header again", "header only", "empty"],
)
def test_wild_cpu_logs(tmp_path, text, samples, problems):
    path = tmp_path / "cpu.txt"
    path.write_text(text)
    log = read_cpu_log(path)
    assert samples_of(log) == ({"process": samples} if samples else {})
    assert len(log.problems) == problems


# Real and virtual memory, as psrecord wrote them of a training of tiny-bloom whose git was slow to start
BEFORE, DOUBLED, AFTER = (456.398, 2123.348), (957.445, 4821.047), (482.906, 2414.258)


def read_samples(folder: Path, *samples: tuple[float, float] | str) -> MemoryLog:
    """A log of psrecord's with (real, virtual) once a second; a text stands there as it is."""
    path = folder / "cpu.txt"
    lines = [s if isinstance(s, str) else f"{at}.0 99.0 {s[0]} {s[1]}\n" for at, s in enumerate(samples)]
    path.write_text(CPU_HEADER + "".join(lines))
    return read_cpu_log(path, restarts=1)


def test_sample_with_a_forked_child_is_left_out_and_counted(tmp_path):
    log = read_samples(tmp_path, BEFORE, DOUBLED, AFTER, (640.0, 2680.0))
    assert samples_of(log) == {"process": [456.398, 482.906, 640]}
    assert (log.peak("process"), log.minimum("process"), len(log.samples["process"])) == (640, 456.398, 3)
    assert log.mean("process") == pytest.approx((456.398 + 482.906 + 640) / 3)
    assert (957.445 not in [mib for _, mib in log.curve("process")]) and log.span() == 3
    assert log.left_out() == "1 sample of 957 MiB left out: a forked child was counted with its parent"
    assert log.gaps() == []
    large = (2000.0, 9000.0)
    log = read_samples(tmp_path, BEFORE, DOUBLED, AFTER, large, (4000.0, 18000.0), large, large)
    assert log.left_out() == "2 samples of up to 4,000 MiB left out: a forked child was counted with its parent"


@pytest.mark.parametrize("block", range(20, 260, 7))
def test_sample_with_a_forked_child_is_found_wherever_a_part_of_the_log_ends(tmp_path, monkeypatch, block):
    monkeypatch.setattr(files, "BLOCK", block)
    log = read_samples(tmp_path, BEFORE, DOUBLED, AFTER, DOUBLED, AFTER)
    assert samples_of(log) == {"process": [456.398, 482.906, 482.906]}
    assert len(log.doubled) == 2


@pytest.mark.parametrize(
    "samples",
    [
        (BEFORE, DOUBLED, DOUBLED, AFTER),
        (DOUBLED, AFTER, AFTER),
        (BEFORE, AFTER, DOUBLED),
        (BEFORE, DOUBLED, CPU_HEADER, AFTER, AFTER),
        (BEFORE, CPU_HEADER, DOUBLED, AFTER, AFTER),
        (BEFORE, (957.445, 2915.0), AFTER),
        (BEFORE, (500.0, 4821.047), AFTER),
        (BEFORE, (1900.0, 4821.047), AFTER),
        (BEFORE, (957.445, 9600.0), AFTER),
        (BEFORE, DOUBLED, (957.0, 4821.0)),
        (BEFORE, DOUBLED, (2500.0, 4400.0)),
        ((9.0, 30.0), (400.0, 2000.0), (410.0, 2010.0)),
    ],
    ids=["two samples long", "first", "last", "before a restart", "behind a restart", "real memory of its own",
         "virtual memory alone", "more than twice the real", "more than twice the virtual", "it stays", "it grows on",
         "start of a process"],
)  # fmt: skip
def test_peak_that_may_be_true_is_kept(tmp_path, samples):
    """What the process itself took for a moment, what lasts, and what has not a sample on either side."""
    log = read_samples(tmp_path, *samples)
    assert log.left_out() == ""
    assert log.gaps() == []
    real = [sample[0] for sample in samples if not isinstance(sample, str)]
    assert samples_of(log) == {"process": real}


def log_of(**series: list[tuple]) -> MemoryLog:
    """A log with (time, MiB) of each series."""
    log = MemoryLog(Path("gpu.csv"))
    for name, points in series.items():
        log.samples[name.removeprefix("gpu")] = Samples()
        log.samples[name.removeprefix("gpu")].add(*map(list, zip(*points, strict=True)))
    return log


def test_peak_low_mean_and_order_of_the_gpus():
    log = log_of(gpu10=[("", 3.0)], gpu9=[("", 5.0), ("", 2.0), ("", 5.0)])
    assert log.names() == ["9", "10"]
    assert (log.peak("9"), log.minimum("9"), log.mean("9"), len(log.samples["9"])) == (5, 2, 4, 3)


def test_curve_and_span():
    log = log_of(gpu0=[("2026/01/31 23:59:58.500", 7.0), ("2026/02/01 00:00:03.250", 9.0)])
    assert log.curve("0") == [(0, 7), (4.75, 9)]
    assert log.span() == 4.75
    assert log_of(process=[(1.5, 1.0), (3.0, 1.0), (9.5, 1.0)]).span() == 8


def test_span_is_that_of_the_series_that_was_logged_longest():
    start, end = "2026/01/31 23:59:58.500", "2026/02/01 00:01:58.500"
    assert log_of(gpu0=[(start, 1.0), (start, 1.0)], gpu1=[(start, 1.0), (end, 1.0)]).span() == 120


def test_span_of_times_that_cannot_be_read_is_not_known():
    assert log_of(gpu0=[("yesterday", 1.0), ("today", 1.0)]).span() is None
    assert MemoryLog(Path("gpu.csv")).span() is None


def test_long_log_keeps_its_peaks_in_a_few_points(tmp_path, monkeypatch):
    """In parts of a few lines each, and a line that is longer than a part."""
    monkeypatch.setattr(files, "BLOCK", 1000)
    monkeypatch.setattr(files, "LONGEST_LINE", 500)
    values = [(number * 37) % 1000 for number in range(10 * POINTS)]
    values[12_345] = 9999
    path = tmp_path / "cpu.txt"
    lines = [f"{number}.0 99.0 {mib} 9999.0" for number, mib in enumerate(values)]
    path.write_text(CPU_HEADER + "\n".join([*lines[:50], "x" * 5000, *lines[50:]]) + "\n")
    log = read_cpu_log(path)
    assert log.problems == [f"{path}:52: no sample ({'x' * 60})"]
    assert len(log.samples["process"]) == len(values)
    assert (log.peak("process"), log.minimum("process")) == (9999, 0)
    assert log.mean("process") == pytest.approx(sum(values) / len(values))
    curve = log.curve("process")
    assert len(curve) <= 2 * POINTS
    assert (12_345, 9999) in curve
    assert curve == sorted(curve)


def test_log_that_a_resumed_job_went_on_with(tmp_path):
    """psrecord counts from 0 again, and the line that was written when the job was killed may have no end."""
    first = " 0.0 10.0 100.0 4000.0\n 5.0 10.0 200.0 4000.0\n"
    second = CPU_HEADER + " 1.0 10.0 300.0 4000.0\n"
    path = tmp_path / "cpu.txt"
    for cut in ("", " 6.0 10"):
        path.write_text(CPU_HEADER + first + cut + second + second)
        log = read_cpu_log(path, restarts=2)
        assert log.problems == []
        assert log.curve("process") == [(0, 100), (5, 200), (6, 300), (7, 300)]
        explained = read_cpu_log(path, restarts=1)
        assert [problem.split(": ")[1] for problem in explained.problems] == [
            "another header, the logger was restarted"
        ]
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_HEADER + gpu_line(0, 1) + gpu_line(0, 9)[:30] + GPU_HEADER + gpu_line(0, 2))
    assert read_gpu_log(path, restarts=1).problems == []
    assert read_gpu_log(path).problems == [f"{path}:3: another header, the logger was restarted"]


def test_logs_of_a_job_are_not_those_of_its_neighbours():
    """A job's name may hold what a shell takes for a pattern."""
    Path("gpu_memory").mkdir()
    for job in ("1", "1_node1", "10", "10_node1", "[1]"):
        Path(f"gpu_memory/gpu_memory_log_{job}.csv").touch()
    found, of_cpu = logs_of(Path(), "1")
    assert [path.name for path in found] == ["gpu_memory_log_1.csv", "gpu_memory_log_1_node1.csv"]
    assert of_cpu == []
    assert [host_of(path) for path in found] == ["", "node1"]
    assert [path.name for path in logs_of(Path(), "[1]")[0]] == ["gpu_memory_log_[1].csv"]


def test_a_log_that_cannot_be_read_is_a_problem_and_no_traceback(tmp_path):
    """A pipe nobody writes into would keep the reader waiting."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert read_gpu_log(Path("absent.csv")).problems == ["absent.csv: cannot be read (No such file or directory)"]
    assert read_cpu_log(Path()).problems == [".: cannot be read (not a regular file)"]
    assert read_gpu_log(pipe).problems == [f"{pipe}: cannot be read (not a regular file)"]


def test_many_problems_are_counted():
    log = MemoryLog(Path("gpu.csv"))
    for number in range(9):
        log.report(number, "no sample")
    assert log.gaps() == [*(f"gpu.csv:{number}: no sample" for number in range(3)), "gpu.csv: 6 more such lines"]


@pytest.mark.parametrize("index", ["-1", "256", "1e3", "9" * 5000, "", "one"])
def test_index_that_no_gpu_has_is_no_sample(tmp_path, index):
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_HEADER + gpu_line(index, 1) + gpu_line(255, 2))
    log = read_gpu_log(path)
    assert samples_of(log) == {"255": [2]}
    assert len(log.problems) == 1


@pytest.mark.parametrize(
    "line", ["1e400 1 1 1", "1 1 1e400 1", "nan 1 1 1", "1 1 nan 1", "1 1 -1 1", "-1 1 1 1", "1 1 1e10 1"]
)
def test_number_that_nobody_measured_is_no_sample(tmp_path, line):
    path = tmp_path / "cpu.txt"
    path.write_text(f"{CPU_HEADER}{line}\n2 1 1 1\n")
    assert read_cpu_log(path).problems == [f"{path}:2: no sample ({line})"]
