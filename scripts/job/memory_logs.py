"""Read the memory logs of a job: nvidia-smi's CSV and psrecord's table.

The log of a killed job may end in the middle of a line, and some GPUs report [N/A]. A line that is not a sample is
skipped and reported. A resumed job appends a second header and its samples to the same log. The GPU logs of earlier
versions have no power and no load, so one log may hold lines of both kinds. This module imports no large package,
because job/end_of_job.py must start quickly.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from glob import escape
from pathlib import Path
from typing import NamedTuple

from shared.files import read_file

GPU_HEADER = "timestamp, index"
CPU_HEADER = "# Elapsed time"
SHOWN_PROBLEMS = 3
END = 2**16  # bytes; a node with 8 GPUs writes about 700 bytes at a time
UNKNOWN = "[N/A]"  # nvidia-smi's text for a value that the GPU does not report
ZERO = datetime(1970, 1, 1)


class Sample(NamedTuple):
    """One line of a log. A series is a GPU index or "process".

    load: in percent of a GPU, or of one core. total: memory of the GPU in MiB. A value that is not reported is None: a
    GPU that shares the memory of the CPU, such as GB10, has no memory of its own.
    """

    series: str
    seconds: float
    mib: float | None
    watts: float | None = None
    load: float | None = None
    total: float | None = None


LineParser = Callable[[str], Sample]  # a function that parses a line; it raises ValueError if the line is not a sample


@dataclass
class MemoryLog:
    """Samples of one log.

    samples: lists of samples by series.
    problems: lines that could not be read, as ``file:line: reason``.
    """

    path: Path
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def mib(self, series: str) -> list[float]:
        """Return the memory of the samples in which it is known."""
        return [mib for _, mib in self.curve(series)]

    def peak(self, series: str) -> float:
        return max(self.mib(series), default=0)

    def mean(self, series: str) -> float:
        return sum(self.mib(series)) / len(self.mib(series))

    def mean_power(self, series: str) -> float | None:
        """Return the mean power in W over the samples whose power is known, or None if there is none."""
        known = [watts for _, watts in self.power_curve(series)]
        return sum(known) / len(known) if known else None

    def names(self) -> list[str]:
        """Return the names of the series, ordered by GPU index."""
        return sorted(self.samples, key=lambda name: (len(name), name))

    def start(self, series: str) -> float:
        """Return the seconds of the first sample."""
        return self.samples[series][0].seconds

    def curve(self, series: str, value: str = "mib") -> list[tuple[float, float]]:
        """Return the known memory as (seconds since the first sample, MiB). value: another field of Sample."""
        known = [(each.seconds, getattr(each, value)) for each in self.samples[series]]
        return [(seconds - self.start(series), value) for seconds, value in known if value is not None]

    def power_curve(self, series: str) -> list[tuple[float, float]]:
        """Return the known power as (seconds since the first sample, W)."""
        return self.curve(series, "watts")

    def span(self) -> float:
        """Return the seconds from the first to the last sample."""
        return max((samples[-1].seconds - samples[0].seconds for samples in self.samples.values()), default=0)


def memory_log_paths(folder: Path, job_id: str) -> tuple[list[Path], list[Path]]:
    """Return the paths of a job's GPU logs and CPU logs, one per node.

    A name ends in the job's id or in `<id>_<host>`, so job 1 does not match the logs of job 10.
    """
    found = []
    for kind, suffix in (("gpu", "csv"), ("cpu", "txt")):
        name = f"{kind}_memory_log_{job_id}"
        logs = (folder / f"{kind}_memory").glob(f"{escape(name)}*.{suffix}")
        found.append(sorted(log for log in logs if log.stem.removeprefix(name)[:1] in ("", "_")))
    return found[0], found[1]


def log_host(path: Path) -> str:
    """Return the host in ``gpu_memory_log_<job id>[_<host>].csv``, or an empty text if the name has none."""
    return "".join(path.stem.split("_", 4)[4:])


def read_gpu_log(path: Path) -> MemoryLog:
    """Read the used memory and the power of each GPU from nvidia-smi's CSV, with or without units.

    The command is ``nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total,power.draw,utilization.gpu
    --format=csv``. In earlier versions, the last two columns were missing.
    """
    return read_log(path, GPU_HEADER, gpu_sample, turned_back=3600)


def gpu_sample(line: str) -> Sample:
    """Parse a line with five or seven fields.

    A line that is cut after its used memory may count as a line with five fields. Its time and its memory are complete.
    """
    time, index, _, used, total, *added = line.split(", ")
    power, load = added or (UNKNOWN, UNKNOWN)
    seconds = local_seconds(datetime.fromisoformat(time.replace("/", "-")))
    sample = Sample(index, seconds, *map(number_if_known, (used, power, load, total)))
    shares_memory = sample.mib is None and sample.total is None and sample.watts is not None
    if not shares_memory and not number(used) <= number(total):
        raise ValueError("a part is cut off")
    return sample


def number(text: str) -> float:
    """Return a number with or without a unit, such as "900 MiB", "71.23 W" or "98 %"."""
    return float(text.split(" ")[0])


def number_if_known(text: str) -> float | None:
    """Return a number, or None if the GPU does not report it: [N/A], [Not Supported] and others."""
    return None if text.startswith("[") and text.endswith("]") else number(text)


def local_seconds(time: datetime) -> float:
    """Return the seconds since 1970 on a node's clock, as nvidia-smi logs the time: in local time, without its zone.

    time: a time without a zone, or a time with the zone of the node.
    """
    return (time.replace(tzinfo=None) - ZERO).total_seconds()


def read_cpu_log(path: Path) -> MemoryLog:
    """Read the resident memory of all processes of the training from ``psrecord --log``.

    psrecord writes MiB but calls the unit MB. Its seconds restart at 0 when a job resumes. Here they continue.
    """
    return read_log(path, CPU_HEADER, cpu_sample)


def cpu_sample(line: str) -> Sample:
    time, load, real, _ = line.split()
    return Sample("process", float(time), float(real), load=float(load))


def last_samples(path: Path) -> list[Sample]:
    """Return the last sample of each series in the end of a log. Samples before its last header are left out.

    A job that has started again writes a header and may have no sample of this attempt yet.
    """
    header, parse = (CPU_HEADER, cpu_sample) if path.suffix == ".txt" else (GPU_HEADER, gpu_sample)
    samples = {}
    for line in read_file(path, END).decode("utf-8", errors="replace").rpartition(header)[2].splitlines():
        with contextlib.suppress(ValueError):
            sample = parse(line)
            samples[sample.series] = sample
    return list(samples.values())


def read_log(path: Path, header: str, parse: LineParser, turned_back: float = 0) -> MemoryLog:
    """Read a log whose seconds may go back.

    turned_back: seconds by which a clock goes back at the end of summer time. Smaller steps are corrections of the
    clock. 0: the seconds count from 0 again.
    """
    log = MemoryLog(path)
    bad = []
    added = before = 0.0
    try:
        text = read_file(path).decode("utf-8", errors="replace")
    except OSError as error:
        log.problems.append(f"{path}: cannot be read ({error.strerror})")
        return log
    for line_number, line in enumerate(text.splitlines(), 1):
        try:
            sample = parse(line)
        except ValueError:
            # A killed job may leave an unfinished line. The header of the next attempt continues that line
            if line.strip() and header not in line:
                bad.append(f"{path}:{line_number}: no sample ({line.strip()[:60]})")
            continue
        if sample.seconds < before - turned_back / 60:
            added += turned_back or before
        before = sample.seconds
        log.samples.setdefault(sample.series, []).append(sample._replace(seconds=before + added))
    log.problems += bad[:SHOWN_PROBLEMS]
    if len(bad) > SHOWN_PROBLEMS:
        log.problems.append(f"{path}: {len(bad) - SHOWN_PROBLEMS} more such lines")
    return log
