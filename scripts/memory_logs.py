"""Reading the memory logs that run beside a job: nvidia-smi's CSV and psrecord's table.

Logs of killed jobs end in mid-line, restarted ones repeat the header, some GPUs answer [N/A]: a line that is
no sample is left out and reported, never guessed.
"""

import csv
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class MemoryLog:
    """Samples per series (GPU index, or "process") and what could not be read, as ``file:line: reason``."""

    samples: dict[str, list[float]] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)

    def peak(self, series: str) -> float:
        return max(self.samples[series])

    def mean(self, series: str) -> float:
        return sum(self.samples[series]) / len(self.samples[series])


def read_gpu_log(path: Path) -> MemoryLog:
    """Used memory in MiB per GPU index, from ``nvidia-smi --query-gpu=timestamp,index,name,memory.used,memory.total
    --format=csv`` with or without units."""
    log = MemoryLog()
    for number, line in enumerate(lines(path), 1):
        fields = next(csv.reader([line], skipinitialspace=True), [])
        if not fields or fields[0] == "timestamp":
            continue
        try:
            index, used = int(fields[1]), float(fields[3].removesuffix("MiB"))
            float(fields[4].removesuffix("MiB"))  # the last column: the line is whole
        except (IndexError, ValueError):
            log.problems.append(f"{path}:{number}: no sample ({line.strip()[:60]})")
            continue
        log.samples.setdefault(str(index), []).append(used)
    return log


def read_cpu_log(path: Path) -> MemoryLog:
    """Resident memory in MiB of the training's processes together, from ``psrecord --log`` (which says MB)."""
    log = MemoryLog()
    for number, line in enumerate(lines(path), 1):
        if not line.strip() or line.startswith("#"):
            continue
        fields = line.split()
        try:
            _, _, real, _ = (float(value) for value in fields)
        except ValueError:
            log.problems.append(f"{path}:{number}: no sample ({line.strip()[:60]})")
            continue
        log.samples.setdefault("process", []).append(real)
    return log


def lines(path: Path) -> list[str]:
    return path.read_text(encoding="utf-8", errors="replace").splitlines()
