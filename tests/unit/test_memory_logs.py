"""The memory logs that run beside a job: what is read of a good one, of a cut one, and whose they are."""

import re
from pathlib import Path

import pytest

from reporting.memory_logs import MemoryLog, host_of, logs_of, read_cpu_log, read_gpu_log

GPU_HEADER = "timestamp, index, name, memory.used [MiB], memory.total [MiB]\n"
CPU_HEADER = "# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)\n"


def gpu_line(index: int, used: object, unit: str = "") -> str:
    return f"2026/01/31 10:00:00.123, {index}, NVIDIA H200, {used}{unit}, 143771{unit}\n"


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
    assert log.samples == samples
    assert len(log.problems) == problems
    assert all(
        re.match(rf"{re.escape(str(path))}:\d+: (no sample|another header)", problem) for problem in log.problems
    )


@pytest.mark.parametrize("length", range(len(gpu_line(0, 700)) + 1))
def test_a_line_cut_anywhere_gives_its_value_or_none(tmp_path, length):
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_HEADER + gpu_line(0, 700)[:length])
    assert read_gpu_log(path).samples in ({}, {"0": [700]})


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
    assert log.samples == ({"process": samples} if samples else {})
    assert len(log.problems) == problems


def test_peak_and_mean():
    log = MemoryLog(Path("gpu.csv"), {"0": [1.0, 4.0, 1.0]})
    assert (log.peak("0"), log.mean("0")) == (4, 2)


def test_low_and_order_of_the_gpus():
    log = MemoryLog(Path("gpu.csv"), {"10": [3.0], "9": [5.0, 2.0]})
    assert (log.names(), log.minimum("9")) == (["9", "10"], 2)


def stamped(*times: str) -> MemoryLog:
    return MemoryLog(Path("gpu.csv"), {"0": [1.0] * len(times)}, {"0": list(times)})


def test_elapsed_time_and_span():
    log = stamped("2026/01/31 23:59:58.500", "2026/02/01 00:00:03.250")
    assert log.elapsed("0") == [0, 4.75]
    assert log.span() == 4.75
    log.times["1"] = ["2026/01/31 23:59:58.500", "2026/02/01 00:01:58.500"]
    assert log.span() == 120
    assert MemoryLog(Path("cpu.txt"), times={"process": ["1.5", "3.0", "9.5"]}).span() == 8


def test_span_of_times_that_cannot_be_read_is_not_known():
    assert stamped("yesterday", "today").span() is None
    assert MemoryLog(Path("gpu.csv")).span() is None


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


def test_a_log_that_cannot_be_read_is_a_problem_and_no_traceback():
    assert read_gpu_log(Path("absent.csv")).problems == ["absent.csv: cannot be read (No such file or directory)"]
    assert read_cpu_log(Path()).problems == [".: cannot be read (Is a directory)"]


def test_many_problems_are_counted():
    log = MemoryLog(Path("gpu.csv"), problems=[str(number) for number in range(9)])
    assert log.gaps() == ["0", "1", "2", "gpu.csv: 6 more such lines"]
