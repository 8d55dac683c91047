"""Reading the memory logs that run beside a job: nvidia-smi's CSV and psrecord's table.

Logs of killed jobs end in mid-line, restarted ones repeat the header, some GPUs answer [N/A]: a line that is
no sample is left out and reported, never guessed. Nothing large is imported: job/finish.py has only seconds.
"""

from dataclasses import dataclass, field
from datetime import datetime
from glob import escape
from pathlib import Path

GPU_COLUMNS = ("timestamp", "index", "name", "memory.used", "memory.total")
SHOWN_PROBLEMS = 3


@dataclass
class MemoryLog:
    """Samples in MiB per series (GPU index, or "process"), their times as logged, and what could not be read,
    as ``file:line: reason``."""

    path: Path
    samples: dict[str, list[float]] = field(default_factory=dict)
    times: dict[str, list[str]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def peak(self, series: str) -> float:
        return max(self.samples[series])

    def minimum(self, series: str) -> float:
        return min(self.samples[series])

    def mean(self, series: str) -> float:
        return sum(self.samples[series]) / len(self.samples[series])

    def names(self) -> list[str]:
        """Series, in the order of their GPU index."""
        return sorted(self.samples, key=lambda name: (len(name), name))

    def elapsed(self, series: str) -> list[float]:
        """Seconds since the series' first sample. ValueError when a time cannot be read."""
        times = self.times[series]
        if series == "process":
            return [float(time) for time in times]
        stamps = [datetime.strptime(time.strip(), "%Y/%m/%d %H:%M:%S.%f") for time in times]
        return [(stamp - stamps[0]).total_seconds() for stamp in stamps]

    def span(self) -> float | None:
        """Seconds from the first sample to the last, None when they are not known."""
        spans = []
        for name, times in self.times.items():
            ends = MemoryLog(self.path, times={name: [times[0], times[-1]]})
            try:
                first, last = ends.elapsed(name)
            except ValueError:
                return None
            spans.append(last - first)
        return max(spans, default=None)

    def gaps(self) -> list[str]:
        """The first problems, and how many more there are."""
        more = len(self.problems) - SHOWN_PROBLEMS
        return self.problems[:SHOWN_PROBLEMS] + ([f"{self.path}: {more} more such lines"] if more > 0 else [])


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


def read_gpu_log(path: Path) -> MemoryLog:
    """Used memory in MiB per GPU index, from ``nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total
    --format=csv`` with or without units, columns in the order of the header."""
    log = MemoryLog(path)
    headers = 0
    series: dict[str, tuple[list[float], list[str]]] = {}  # field of the index, as it stands there -> samples, times
    width, at_index, at_used, at_total = 5, 1, 3, 4  # of a log whose header is cut off
    for number, line in enumerate(read_lines(path, log, units=" MiB"), 1):
        fields = line.split(",")
        try:
            used = float(fields[at_used])
            if len(fields) != width or not 0 <= used <= float(fields[at_total]):
                raise ValueError
            samples, times = series.get(fields[at_index]) or new_series(log, fields[at_index], series)
            samples.append(used)
            times.append(fields[0])
            continue
        except (IndexError, ValueError):
            if not line.strip():
                continue
        if not fields[0].strip().startswith("timestamp"):
            log.problems.append(f"{path}:{number}: no sample ({line.strip()[:60]})")
            continue
        headers += 1
        columns = [name.split("[")[0].strip() for name in fields]
        if not set(GPU_COLUMNS) <= set(columns):
            log.problems.append(f"{path}:{number}: a column is missing, expected: {', '.join(GPU_COLUMNS)}")
            break
        width = len(columns)
        at_index, at_used, at_total = (columns.index(name) for name in ("index", "memory.used", "memory.total"))
        if headers > 1:
            log.problems.append(f"{path}:{number}: another header, the logger was restarted")
    return log


def new_series(log: MemoryLog, index: str, series: dict) -> tuple[list, list]:
    """Samples and times of a GPU that was not seen before. ValueError when `index` is none."""
    name = index.strip()
    if not name.isdigit():
        raise ValueError(index)
    series[index] = log.samples.setdefault(name, []), log.times.setdefault(name, [])
    return series[index]


def read_cpu_log(path: Path) -> MemoryLog:
    """Resident memory in MiB of the training's processes together, from ``psrecord --log`` (which says MB)."""
    log = MemoryLog(path)
    headers = 0
    samples = []
    times = []
    for number, line in enumerate(read_lines(path, log), 1):
        fields = line.split()
        if line.startswith("#"):
            headers += 1
            if headers > 1:
                log.problems.append(f"{path}:{number}: another header, the logger was restarted")
        elif fields:
            try:
                time, _, real, virtual = (float(value) for value in fields)
                if not (time >= 0 and 0 <= real < float("inf") and virtual >= 0):
                    raise ValueError
            except ValueError:
                log.problems.append(f"{path}:{number}: no sample ({line.strip()[:60]})")
                continue
            samples.append(real)
            times.append(fields[0])
    if samples:
        log.samples["process"] = samples
        log.times["process"] = times
    return log


def read_lines(path: Path, log: MemoryLog, units: str = "") -> list[str]:
    """The lines as an editor numbers them, without `units`; bytes that are no UTF-8 are reported."""
    try:
        text = path.read_bytes().decode("utf-8", errors="replace")
    except OSError as error:
        log.problems.append(f"{path}: cannot be read ({error.strerror})")
        return []
    damaged = text.find("\ufffd")
    if damaged >= 0:
        log.problems.append(f"{path}:{text.count(chr(10), 0, damaged) + 1}: not UTF-8")
    return (text.replace(units, "") if units else text).split("\n")
