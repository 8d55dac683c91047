"""Reading the memory logs that run beside a job: nvidia-smi's CSV and psrecord's table.

Logs of killed jobs end in mid-line, restarted ones repeat the header, some GPUs answer [N/A]: a line that is
no sample is left out and reported, never guessed. A log of any length takes the same memory. Nothing large is
imported: job/finish.py has only seconds.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime
from glob import escape
from pathlib import Path

from reporting.files import text_blocks

GPU_COLUMNS = ("timestamp", "index", "name", "memory.used", "memory.total")
CPU_HEADER = "# Elapsed time"
SHOWN_PROBLEMS = 3
POINTS = 2000  # of a curve: more than a plot has pixels
LARGEST_SAMPLE = 1e9  # MiB, and seconds: what is more is no sample
MOST_GPUS = 256  # of one node
LIKE = 0.1  # by which the half of a doubled sample may be beyond those around it

Sample = tuple[float, float, float]  # of psrecord: seconds, and MiB of real and virtual memory


@dataclass
class Samples:
    """What a log says of one GPU or of the processes: over all samples, and as a curve.

    points: (time, MiB), the largest of each `per_point` samples, at most 2 * POINTS. Times are as logged by nvidia-smi,
    seconds for psrecord. first, last: times.
    """

    count: int = 0
    total: float = 0.0
    peak: float = -math.inf
    minimum: float = math.inf
    first: str | float = ""
    last: str | float = ""
    points: list[tuple[str | float, float]] = field(default_factory=list)
    per_point: int = 1

    def __len__(self) -> int:
        return self.count

    def add(self, times: list, samples: list[float]) -> None:
        """Take in the next samples, one at least."""
        self.first = times[0] if not self.count else self.first
        self.last = times[-1]
        self.count += len(samples)
        self.total += sum(samples)
        self.peak = max(self.peak, *samples)
        self.minimum = min(self.minimum, *samples)
        for start in range(0, len(samples), self.per_point):
            largest = max(samples[start : start + self.per_point])
            self.points.append((times[samples.index(largest, start)], largest))
        while len(self.points) > 2 * POINTS:
            pairs = zip(self.points[::2], self.points[1::2], strict=False)
            self.points = [max(pair, key=lambda point: point[1]) for pair in pairs]
            self.per_point *= 2


@dataclass
class MemoryLog:
    """Samples in MiB per series (GPU index, or "process"), and what could not be read, as ``file:line: reason``.

    problems: the first of them. more: how many there are besides. doubled: samples that are left out (is_doubled).
    """

    path: Path
    samples: dict[str, Samples] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)
    more: int = 0
    doubled: Samples = field(default_factory=Samples)

    def peak(self, series: str) -> float:
        return self.samples[series].peak

    def minimum(self, series: str) -> float:
        return self.samples[series].minimum

    def mean(self, series: str) -> float:
        return self.samples[series].total / len(self.samples[series])

    def names(self) -> list[str]:
        """Series, in the order of their GPU index."""
        return sorted(self.samples, key=lambda name: (len(name), name))

    def curve(self, series: str) -> list[tuple[float, float]]:
        """(seconds since the first sample, MiB), as many as a plot can show. ValueError for a time that is none."""
        samples = self.samples[series]
        start = seconds(samples.first)
        return [(seconds(time) - start, mib) for time, mib in samples.points]

    def span(self) -> float | None:
        """Seconds from the first sample to the last, None when they are not known."""
        try:
            return max((seconds(own.last) - seconds(own.first) for own in self.samples.values()), default=None)
        except ValueError:
            return None

    def report(self, line: int, reason: str) -> None:
        if len(self.problems) < SHOWN_PROBLEMS:
            self.problems.append(f"{self.path}:{line}: {reason}")
        else:
            self.more += 1

    def gaps(self) -> list[str]:
        """The first problems, and how many more there are."""
        return self.problems + ([f"{self.path}: {self.more} more such lines"] if self.more else [])

    def left_out(self) -> str:
        """Which samples the numbers leave out, and why; empty when there are none."""
        count, largest = len(self.doubled), self.doubled.peak
        which = f"1 sample of {largest:,.0f} MiB" if count == 1 else f"{count} samples of up to {largest:,.0f} MiB"
        return f"{which} left out: a forked child was counted with its parent" if count else ""


def seconds(time: str | float) -> float:
    """A time of a log as seconds, from a zero of its own. ValueError."""
    if isinstance(time, float):
        return time
    return (datetime.strptime(time.strip(), "%Y/%m/%d %H:%M:%S.%f") - datetime(1970, 1, 1)).total_seconds()


def logs_of(folder: Path, job_id: str) -> tuple[list[Path], list[Path]]:
    """GPU logs and CPU logs of a job, one per node: `<id>` or `<id>_<host>`, so that job 1 gets none of job 10."""
    found = []
    for kind, suffix in (("gpu", "csv"), ("cpu", "txt")):
        start = f"{kind}_memory/{kind}_memory_log_{escape(job_id)}"
        found.append(sorted([*folder.glob(f"{start}.{suffix}"), *folder.glob(f"{start}_*.{suffix}")]))
    return found[0], found[1]


def host_of(path: Path) -> str:
    """Name of the node in ``gpu_memory_log_<job id>[_<host>].csv``, empty without one."""
    return "".join(path.stem.split("_", 4)[4:])


def read_gpu_log(path: Path, restarts: int = 0) -> MemoryLog:
    """Used memory in MiB per GPU index, from ``nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total
    --format=csv`` with or without units, columns in the order of the header.

    restarts: how often the job began anew and went on with this log, each time with another header.
    """
    log = MemoryLog(path)
    headers = number = 0
    width, at_index, at_used, at_total = 5, 1, 3, 4  # of a log whose header is cut off
    for lines in line_blocks(log, units=" MiB"):
        found: dict[str, tuple[list[float], list[str]]] = {}  # field of the index, as it stands there -> samples, times
        for line in lines:
            number += 1
            fields = line.split(",")
            try:
                used = float(fields[at_used])
                if len(fields) != width or not 0 <= used <= float(fields[at_total]) <= LARGEST_SAMPLE:
                    raise ValueError
                samples, times = found.get(fields[at_index]) or new_series(fields[at_index], found)
                samples.append(used)
                times.append(fields[0])
                continue
            except (IndexError, ValueError):
                if not line.strip():
                    continue
            header = max(0, line.find("timestamp, "))  # in mid-line where a killed job left the line before it open
            columns = [name.split("[")[0].strip() for name in line[header:].split(",")]
            if set(GPU_COLUMNS) <= set(columns):
                headers += 1
            elif line.lstrip().startswith("timestamp"):
                log.report(number, f"a column is missing, expected: {', '.join(GPU_COLUMNS)}")
                return log
            else:
                log.report(number, f"no sample ({line.strip()[:60]})")
                continue
            width = len(columns)
            at_index, at_used, at_total = (columns.index(name) for name in ("index", "memory.used", "memory.total"))
            if headers > 1 + restarts:
                log.report(number, "another header, the logger was restarted")
        for index, (samples, times) in found.items():
            log.samples.setdefault(str(int(index)), Samples()).add(times, samples)
    return log


def new_series(index: str, found: dict) -> tuple[list, list]:
    """Samples and times of a GPU that was not seen before in this part of the log. ValueError when `index` is none."""
    if not 0 <= int(index) < MOST_GPUS:
        raise ValueError(index)
    found[index] = [], []
    return found[index]


def read_cpu_log(path: Path, restarts: int = 0) -> MemoryLog:
    """Resident memory in MiB of the training's processes together, from ``psrecord --log`` (which says MB).

    restarts: as for read_gpu_log. psrecord counts its seconds from 0 again, here they go on.
    """
    log = MemoryLog(path)
    headers = number = 0
    ended = 0.0  # seconds: of the parts that have ended
    before: Sample | None = None  # of this part: the last sample but one, and the last
    last: Sample | None = None
    for lines in line_blocks(log):
        found: list[Sample] = []
        for line in lines:
            number += 1
            if CPU_HEADER in line:  # in mid-line where a killed job left the line before it open
                headers += 1
                if last:
                    found.append(last)
                    ended = last[0]
                before = last = None
                if headers > 1 + restarts:
                    log.report(number, "another header, the logger was restarted")
                continue
            fields = line.split()
            if not fields:
                continue
            try:
                time, _, real, virtual = map(float, fields)
                if not (0 <= time <= LARGEST_SAMPLE and 0 <= real <= LARGEST_SAMPLE and virtual >= 0):
                    raise ValueError
            except ValueError:
                log.report(number, f"no sample ({line.strip()[:60]})")
                continue
            sample = ended + time, real, virtual
            if before and last and is_doubled(before, last, sample):
                log.doubled.add([last[0]], [last[1]])
            elif last:
                found.append(last)
            before, last = last, sample
        take_in(log, found)
    take_in(log, [last] if last else [])
    return log


def take_in(log: MemoryLog, found: list[Sample]) -> None:
    if found:
        times, real, _ = map(list, zip(*found, strict=True))
        log.samples.setdefault("process", Samples()).add(times, real)


def is_doubled(before: Sample, sample: Sample, after: Sample) -> bool:
    """Whether a sample has a process twice: once as a child that it has just forked, up to the child's exec.

    Such a child has all of its parent's memory, or shares it. So the sample's half, of real memory and of virtual, is
    what the samples around it have. A process that takes so much itself for a moment shows otherwise: PyTorch has
    several times as much virtual memory as real, which does not grow by the same factor.
    """
    for mine, *others in zip(sample[1:], before[1:], after[1:], strict=True):
        if not (1 - LIKE) * min(others) <= mine / 2 <= (1 + LIKE) * max(others):
            return False
    return sample[2] > 1.5 * max(before[2], after[2])


def line_blocks(log: MemoryLog, units: str = "") -> Iterator[list[str]]:
    """The log's lines as an editor numbers them, without `units`, many at a time; what cannot be read is reported."""
    number = 1
    damaged = False
    try:
        for text in text_blocks(log.path):
            at = -1 if damaged else text.find("\ufffd")
            if at >= 0:
                log.report(number + text.count("\n", 0, at), "not UTF-8")
                damaged = True
            lines = (text.replace(units, "") if units else text).split("\n")
            number += len(lines)
            yield lines
    except OSError as error:
        log.problems.append(f"{log.path}: cannot be read ({error.strerror})")
