"""Measure the time and memory of the report, for runs with 720 samples of 8 GPUs each.

    python benchmarks/report.py            # 100, 1,000 and 2,000 runs
    python benchmarks/report.py 50 100

Each report runs in its own process. The table is from 2 cores of an Intel Xeon. Imports and plots take about 4 s of
CPU time for any number of runs:

      runs  seconds  CPU s  peak MiB
       100     5.90   5.82       191
      1000    11.31  12.61       239
      2000    14.26  20.39       279

These runs have no saved configs, so the report does not predict their memory. With configs, the imports and the first
prediction take 6 s, and each further distinct setting takes 0.1 to 0.6 s.
"""

import json
import os
import random
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
SAMPLES, GPUS, INTERVAL_S = 720, 8, 5
SAMPLE_RUN = "tests/data/runs/experiments/deepspeed-multi-gpu/4_gpus/results/110.json"


def make_runs(folder: Path, runs: int) -> None:
    """Write the records and logs of runs of one hour each, spread over the experiments of this repository."""
    record = json.loads((REPOSITORY / SAMPLE_RUN).read_text())
    experiments = sorted(path.parent for path in (REPOSITORY / "experiments").rglob("*.slurm"))
    for number in range(runs):
        path = folder / experiments[number % len(experiments)].relative_to(REPOSITORY)
        for name in ("results", "gpu_memory", "cpu_memory"):
            (path / name).mkdir(parents=True, exist_ok=True)
        job_id = str(1000 + number)
        record |= {"experiment": str(path.relative_to(folder)), "job_id": job_id, "world_size": GPUS}
        record["started"] = f"2026-11-20T10:{number // 60:02d}:{number % 60:02d}+00:00"
        (path / "results" / f"{job_id}.json").write_text(json.dumps(record))
        write_logs(path, job_id, random.Random(number))


def write_logs(path: Path, job_id: str, chance: random.Random) -> None:
    stamps = [time.strftime("%Y/%m/%d %H:%M:%S.000", time.gmtime(i * INTERVAL_S)) for i in range(SAMPLES)]
    gpu = ["timestamp, index, name, memory.used [MiB], memory.total [MiB], power.draw [W], utilization.gpu [%]"]
    for stamp in stamps:
        for i in range(GPUS):
            values = f"{chance.randrange(32768)}, 32768, {chance.uniform(40, 300):.2f}, {chance.randrange(101)}"
            gpu.append(f"{stamp}, {i}, Tesla V100-SXM2-32GB, {values}")
    cpu = ["# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)"]
    cpu += [f"{i * INTERVAL_S:12.3f} {99.9:12.3f} {chance.uniform(0, 9e4):12.3f} {1e5:12.3f}" for i in range(SAMPLES)]
    (path / "gpu_memory" / f"gpu_memory_log_{job_id}.csv").write_text("\n".join(gpu) + "\n")
    (path / "cpu_memory" / f"cpu_memory_log_{job_id}.txt").write_text("\n".join(cpu) + "\n")


def measure(folder: Path) -> tuple[float, float, float]:
    """Run the report on a folder whose files are in the page cache. Return seconds, CPU seconds and peak MiB."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    started = time.perf_counter()
    command = [sys.executable, "scripts/report.py", str(folder), "-o", str(folder / "report")]
    subprocess.run(command, cwd=REPOSITORY, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - started
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return seconds, after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime, after.ru_maxrss / 1024


def main() -> None:
    # Smaller reports run first, because ru_maxrss is the maximum over all children so far.
    sizes = sorted(map(int, sys.argv[1:])) or [100, 1000, 2000]
    print(f"{os.cpu_count()} cores, {SAMPLES} samples of {GPUS} GPUs per run")
    print(f"{'runs':>6} {'seconds':>8} {'CPU s':>6} {'peak MiB':>9}")
    for runs in sizes:
        folder = Path(tempfile.mkdtemp(prefix="report-benchmark-"))
        try:
            make_runs(folder, runs)
            seconds, cpu, mib = measure(folder)
        finally:
            shutil.rmtree(folder)
        print(f"{runs:6} {seconds:8.2f} {cpu:6.2f} {mib:9.0f}")


if __name__ == "__main__":
    main()
