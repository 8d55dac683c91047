"""Memory logs of a job: the samples of complete and damaged logs, and the choice of the job's own logs."""

from pathlib import Path

import pytest

from job.memory_logs import read_cpu_log, read_gpu_log
from report_files import CPU_HEADER, GPU_HEADER, OLD_GPU_HEADER, cpu_log, gpu_log, write

GPU_LOG, CPU_LOG = gpu_log(100, 900, 500), cpu_log(10, 90, 50)
LINE = "2026/11/20 22:00:15.000, 0, Tesla V100-SXM2-32GB, {}, 32768, 71.23, 98\n"
OLD_LINE = LINE.replace(", 71.23, 98", "")
OLD_GPU_LOG = GPU_LOG.replace(GPU_HEADER, OLD_GPU_HEADER).replace(", 71.23, 98", "")


GPU_LOGS = {  # content, samples of GPU 0, numbers of the lines without a sample
    "plain": (GPU_LOG, [100, 900, 500], []),
    "with units": (GPU_LOG.replace(", 32768", " MiB, 32768 MiB"), [100, 900, 500], []),
    "without header": (GPU_LOG.split("\n", 1)[1], [100, 900, 500], []),
    "empty": ("", [], []),
    "only header": (GPU_HEADER, [], []),
    "cut in the value": (GPU_LOG + LINE.format(700)[:53], [100, 900, 500], [5]),
    "cut in the total": (GPU_LOG + OLD_LINE.format(700)[:-4], [100, 900, 500], [5]),
    "cut in the power": (GPU_LOG + LINE.format(700)[:-7], [100, 900, 500], [5]),
    "cut before the load": (GPU_LOG + LINE.format(700)[:-3], [100, 900, 500], [5]),
    "cut in the load": (GPU_LOG + LINE.format(700).replace("98", "[N/"), [100, 900, 500], [5]),
    "cut and continued": (GPU_LOG + LINE.format(700)[:15] + LINE.format(7), [100, 900, 500], [5]),
    "five columns": (OLD_GPU_LOG, [100, 900, 500], []),
    "five columns, resumed with seven": (OLD_GPU_LOG + gpu_log(7), [100, 900, 500, 7], []),
    "five columns, cut and resumed": (OLD_GPU_LOG + OLD_LINE.format(700)[:30] + gpu_log(7), [100, 900, 500, 7], []),
    "seven columns, resumed with five": (GPU_LOG + OLD_GPU_LOG, [100, 900, 500] * 2, []),
    "resumed": (GPU_LOG + gpu_log(7), [100, 900, 500, 7], []),
    "cut and resumed": (GPU_LOG + LINE.format(700)[:30] + gpu_log(7), [100, 900, 500, 7], []),
    "not available": (GPU_LOG + LINE.format("[N/A]"), [100, 900, 500], [5]),
    "no driver": ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", [], [1]),
    "zeros after a crash": (GPU_LOG + "\0\0\0\n" + LINE.format(7), [100, 900, 500, 7], [5]),
}


POWER = {  # content, known power of GPU 0
    "plain": (GPU_LOG, [71.23] * 3),
    "with units": (GPU_LOG.replace(", 32768, 71.23, 98", " MiB, 32768 MiB, 71.23 W, 98 %"), [71.23] * 3),
    "five columns, resumed with seven": (OLD_GPU_LOG + gpu_log(7), [71.23]),
    "five columns": (OLD_GPU_LOG, []),
    "no power": (GPU_LOG.replace("71.23", "[N/A]"), []),
    "no load": (GPU_LOG.replace(" 98", " [Not Supported]"), [71.23] * 3),
    "no power and no load, with units": (GPU_LOG.replace("71.23, 98", "[Unknown Error], [N/A]"), []),
    "no memory": (GPU_LOG + LINE.format("[N/A]").replace("32768", "[N/A]"), [71.23] * 4),
    "sometimes": (GPU_LOG + LINE.format(7).replace("71.23", "[N/A]") + LINE.format(7).replace("71", "99"),
                  [71.23] * 3 + [99.23]),
}  # fmt: skip


@pytest.mark.promise("the documents' one-liners work on GPU logs of five and of seven columns")
@pytest.mark.parametrize(("text", "power"), POWER.values(), ids=POWER)
def test_power_is_missing_only_where_it_is_unknown(tmp_path, text, power):
    path = tmp_path / "gpu.csv"
    path.write_text(text)
    log = read_gpu_log(path)
    assert [watts for _, watts in log.power_curve("0")] == power
    assert log.mean_power("0") == (pytest.approx(sum(power) / len(power)) if power else None)
    assert len(log.samples["0"]) == text.count(" 0, Tesla") and not log.problems


CPU_LOGS = {
    "plain": (CPU_LOG, [10, 90, 50], []),
    "cut": (CPU_LOG + "  15.000  99.0  1", [10, 90, 50], [5]),
    "resumed": (CPU_LOG + cpu_log(7), [10, 90, 50, 7], []),
    "cut and resumed": (CPU_LOG + "  15.000  99" + cpu_log(7), [10, 90, 50, 7], []),
    "only header": (CPU_HEADER, [], []),
}


LOGS = {f"GPU, {case}": (read_gpu_log, "0", *row) for case, row in GPU_LOGS.items()}
LOGS |= {f"CPU, {case}": (read_cpu_log, "process", *row) for case, row in CPU_LOGS.items()}


@pytest.mark.promise("the documents' one-liners work on GPU logs of five and of seven columns")
@pytest.mark.parametrize(("read", "name", "text", "samples", "lines"), LOGS.values(), ids=LOGS)
def test_a_log_has_its_complete_samples_and_names_the_other_lines(tmp_path, read, name, text, samples, lines):
    path = tmp_path / "log"
    path.write_text(text)
    log = read(path)
    assert {each: log.mib(each) for each in log.names()} == ({name: samples} if samples else {})
    assert [problem.split(" (")[0] for problem in log.problems] == [f"{path}:{line}: no sample" for line in lines]


def test_many_problems_are_counted_and_a_missing_log_is_a_problem(tmp_path):
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_LOG + LINE.format("[N/A]") * 500)
    assert read_gpu_log(path).problems[3:] == [f"{path}: 497 more such lines"]
    assert read_gpu_log(Path("absent.csv")).problems == ["absent.csv: cannot be read (No such file or directory)"]


def test_peak_mean_and_order_of_the_gpus(tmp_path):
    path = tmp_path / "gpu.csv"
    write(path, GPU_HEADER + "\n" + "".join(LINE.format(mib).replace(" 0,", f" {gpu},")
                                            for gpu, mib in ((10, 3), (9, 5), (9, 2), (9, 5))))  # fmt: skip
    log = read_gpu_log(path)
    assert log.names() == ["9", "10"]
    assert (log.peak("9"), log.mean("9"), len(log.samples["9"])) == (5, 4, 3)


def test_curve_and_span(tmp_path):
    gpu, cpu = tmp_path / "gpu.csv", tmp_path / "cpu.txt"
    lines = [f"{time}, 0, H200, {mib}, 99, 71.23, 98\n" for time, mib in
             (("2026/01/31 23:59:58.500", 7), ("2026/02/01 00:00:03.250", 9))]  # fmt: skip
    gpu.write_text(f"{GPU_HEADER}\n{''.join(lines)}")
    assert read_gpu_log(gpu).curve("0") == [(0, 7), (4.75, 9)]
    assert read_gpu_log(gpu).span() == 4.75
    # Summer time ends
    gpu.write_text(lines[0].replace("01/31 23:59:58", "10/25 02:59:58") + lines[1].replace("02/01 00", "10/25 02"))
    assert (read_gpu_log(gpu).span(), read_gpu_log(gpu).power_curve("0")[-1]) == (4.75, (4.75, 71.23))
    gpu.write_text(OLD_GPU_LOG + LINE.format(7))
    assert read_gpu_log(gpu).curve("0")[-1] == (15, 7)
    assert read_gpu_log(gpu).power_curve("0") == [(15, 71.23)], "memory and power have one time axis"
    cpu.write_text(cpu_log(10, 90) + cpu_log(50, 60, 70))
    log = read_cpu_log(cpu)
    assert log.curve("process") == [(0, 10), (5, 90), (5, 50), (10, 60), (15, 70)], "psrecord counts from 0 again"
    assert log.span() == 15
