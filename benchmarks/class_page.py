"""Measure a refresh of the class at a glance: the clones of 40 participants with 10 runs each.

    python benchmarks/class_page.py            # 40 participants, 10 runs each
    python benchmarks/class_page.py 20 10

Each participant has nine completed runs and one that still runs, with 240 samples of one or two GPUs each. The files
are in the page cache, and a program squeue answers at once. The table is from 2 cores of an Intel Xeon, on a local
disk:

    40 participants x 10 runs, 2 cores; median and maximum in seconds
    imports of a new process  0.25
    first refresh             0.61 0.67
    later refresh             0.15 0.16
    9 predictions             11.8, between two refreshes

A new process reads all clones. With --watch, later refreshes read only the folders of running or recent jobs.
"""

import os
import shutil
import statistics
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(REPOSITORY / name) for name in ("scripts", "tests")]
REPEATS = 5


def age(folders: list[Path]) -> None:
    """Set the times of all folders back to an hour ago. The clones of a class are not written in one minute."""
    before = time.time() - 3600
    for top in folders:
        for name, _, _ in os.walk(top):
            os.utime(name, (before, before))


def main() -> None:
    started = time.perf_counter()
    from reporting.classroom_folder import write_page
    from reporting.classroom_page import Predictions, render_class
    from reporting.classroom_runs import AFTERNOON, ClassReader

    imports = time.perf_counter() - started
    from class_files import make_class

    people, runs = map(int, sys.argv[1:] or (40, 10))
    top = Path(tempfile.mkdtemp(prefix="class-benchmark-"))
    try:
        made = make_class(top, AFTERNOON, people, gpu=True, runs=runs)
        age(made.folders)
        os.environ["PATH"] = f"{made.install_squeue(top)}:{os.environ['PATH']}"
        predictions = Predictions()

        def refresh(reader: ClassReader) -> float:
            started = time.perf_counter()
            participants = reader.read()
            write_page(top / "class.html", render_class(reader, participants, predictions, False, 10))
            return time.perf_counter() - started

        cold, warm = [], []
        for _ in range(REPEATS):
            reader = ClassReader(made.folders, AFTERNOON)
            cold.append(refresh(reader))
            warm.append(refresh(reader))
        started = time.perf_counter()
        number = len(predictions.wanted)
        while predictions.make_next():
            pass
        predicting = time.perf_counter() - started
        reader = ClassReader(made.folders, AFTERNOON)
        cold.append(refresh(reader))
        warm += [refresh(reader) for _ in range(REPEATS)]
    finally:
        shutil.rmtree(top)
    print(f"{people} participants x {runs} runs, {os.cpu_count()} cores; median and maximum in seconds")
    print(f"imports of a new process  {imports:.2f}")
    for name, times in (("first refresh", cold), ("later refresh", warm)):
        print(f"{name:<25} {statistics.median(times):.2f} {max(times):.2f}")
    print(f"{number} predictions             {predicting:.1f}, between two refreshes")


if __name__ == "__main__":
    main()
