"""Read the memory logs of a job: nvidia-smi's CSV and psrecord's table.

The log of a killed job may end in the middle of a line, and some GPUs report [N/A]. A line that is not a sample is
skipped and reported. A resumed job appends a second header and its samples to the same log. This module imports no
large package, because job/end_of_job.py must start quickly.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import datetime
from glob import escape
from pathlib import Path

GPU_HEADER = "timestamp, index"
CPU_HEADER = "# Elapsed time"
SHOWN_PROBLEMS = 3
ZERO = datetime(1970, 1, 1)

# A function that parses a line into series, seconds and MiB. It raises ValueError if the line is not a sample
Parser = Callable[[str], tuple[str, float, float]]


@dataclass
class MemoryLog:
    """Samples of one log.

    samples: lists of (seconds, MiB) by series. A series is a GPU index or "process".
    problems: lines that could not be read, as ``file:line: reason``.
    """

    path: Path
    samples: dict[str, list[tuple[float, float]]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def mib(self, series: str) -> list[float]:
        return [mib for _, mib in self.samples[series]]

    def peak(self, series: str) -> float:
        return max(self.mib(series))

    def mean(self, series: str) -> float:
        return sum(self.mib(series)) / len(self.samples[series])

    def names(self) -> list[str]:
        """Return the names of the series, ordered by GPU index."""
        return sorted(self.samples, key=lambda name: (len(name), name))

    def curve(self, series: str) -> list[tuple[float, float]]:
        """Return the samples as (seconds since the first sample, MiB)."""
        start, _ = self.samples[series][0]
        return [(time - start, mib) for time, mib in self.samples[series]]

    def span(self) -> float:
        """Return the seconds from the first to the last sample."""
        return max((samples[-1][0] - samples[0][0] for samples in self.samples.values()), default=0)


def memory_log_paths(folder: Path, job_id: str) -> tuple[list[Path], list[Path]]:
    """Return the paths of a job's GPU logs and CPU logs, one per node.

    A name ends in the job's id or in `<id>_<host>`, so job 1 does not match the logs of job 10.
    """
    found = []
    for kind, suffix in (("gpu", "csv"), ("cpu", "txt")):
        start = f"{kind}_memory/{kind}_memory_log_{escape(job_id)}"
        found.append(sorted([*folder.glob(f"{start}.{suffix}"), *folder.glob(f"{start}_*.{suffix}")]))
    return found[0], found[1]


def log_host(path: Path) -> str:
    """Return the host in ``gpu_memory_log_<job id>[_<host>].csv``, or an empty text if the name has none."""
    return "".join(path.stem.split("_", 4)[4:])


def read_gpu_log(path: Path) -> MemoryLog:
    """Read the used memory of each GPU from nvidia-smi's CSV, with or without units.

    The command is ``nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total --format=csv``.
    """
    return read_log(path, GPU_HEADER, gpu_sample)


def gpu_sample(line: str) -> tuple[str, float, float]:
    time, index, _, used, total = line.split(", ")
    mib = float(used.removesuffix(" MiB"))
    if not mib <= float(total.removesuffix(" MiB")):
        raise ValueError("a part is cut off")
    return index, (datetime.fromisoformat(time.replace("/", "-")) - ZERO).total_seconds(), mib


def read_cpu_log(path: Path) -> MemoryLog:
    """Read the resident memory of all processes of the training from ``psrecord --log``.

    psrecord writes MiB but calls the unit MB. Its seconds restart at 0 when a job resumes. Here they continue.
    """
    log = read_log(path, CPU_HEADER, cpu_sample)
    ended = before = 0.0
    for number, (time, mib) in enumerate(log.samples.get("process", [])):
        if time < before:
            ended += before
        before = time
        log.samples["process"][number] = ended + time, mib
    return log


def cpu_sample(line: str) -> tuple[str, float, float]:
    time, _, real, _ = line.split()
    return "process", float(time), float(real)


def read_log(path: Path, header: str, parse: Parser) -> MemoryLog:
    log = MemoryLog(path)
    bad = []
    try:
        text = path.read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        log.problems.append(f"{path}: cannot be read ({error.strerror})")
        return log
    for number, line in enumerate(text.splitlines(), 1):
        try:
            series, time, mib = parse(line)
            log.samples.setdefault(series, []).append((time, mib))
        except ValueError:
            # A killed job may leave an unfinished line. The header of the next attempt continues that line
            if line.strip() and header not in line:
                bad.append(f"{path}:{number}: no sample ({line.strip()[:60]})")
    log.problems += bad[:SHOWN_PROBLEMS]
    if len(bad) > SHOWN_PROBLEMS:
        log.problems.append(f"{path}: {len(bad) - SHOWN_PROBLEMS} more such lines")
    return log
