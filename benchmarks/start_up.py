"""Measure the seconds from `sbatch` to the first optimizer step of tiny-bloom, on the tests' Slurm cluster.

    python benchmarks/start_up.py                 # a first job, then fastest, median and slowest of three later jobs
    python benchmarks/start_up.py --repeats 5

Run it as root on Debian. The clock stops when the first loss appears in the log. The first job starts with an empty
home directory, so its caches are empty. Each node has one GPU that is not used: the ranks train on this machine's CPU.
The imports of a run are also measured separately, because a job script cannot shorten them. The table shows the
first job, and the fastest of three later jobs, on 2 cores of an AMD EPYC:

    seconds              imports   first: 8a16574   now    later: 8a16574   now
    plain, one GPU           6.1             12.1   8.4               9.4   7.4
    ZeRO-2, one GPU          5.9            240.3  10.5               8.8   8.8
    ZeRO-2, two nodes        5.9             24.9  15.3              17.2  14.3

At 8a16574, DeepSpeed compiled its optimizers in the first job of ZeRO-2 (240.3 s). The first job on two nodes (24.9 s)
reused the compiled optimizers. Other programs ran during that measurement, so imports took 7.3 s. Jobs on two nodes
take longer because torchrun itself imports PyTorch, and because they run the bandwidth test.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
for folder in ("scripts", "tests", "tests/slurm"):
    sys.path.insert(0, str(REPOSITORY / folder))

from breakable_cluster import BreakableCluster, unavailable  # noqa: E402
from jobs import Lab  # noqa: E402

JOBS = {
    "plain, one GPU": ("baseline", 1),
    "ZeRO-2, one GPU": ("deepspeed-single-gpu/zero_2", 1),
    "ZeRO-2, two nodes": ("deepspeed-multi-node/2_nodes", 2),
}
KNOBS = {"MODEL_NAME": "tiny-bloom", "TRAIN_SIZE": 64, "EVAL_SIZE": 8, "NUM_EPOCHS": 1, "EM_F1": False}
KNOBS |= {"SAVE_STRATEGY": "no", "BATCH_SIZE": 4, "GRAD_ACC": 1, "MAX_LENGTH": 64}
TIMEOUT = 1500  # seconds
IMPORTS = {
    "plain": "from transformers import Trainer; import datasets",
    "ZeRO-2": "from transformers import Trainer; import datasets, deepspeed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    for name, code in IMPORTS.items():
        runs = [time_imports(code) for _ in range(repeats)]
        print(summarize(f"imports of the training, {name}", runs), flush=True)
    with tempfile.TemporaryDirectory() as folder:
        if reason := unavailable():
            sys.exit(f"error: no Slurm cluster here: {reason}")
        cluster = BreakableCluster(f"{folder}/slurm", nodes=2)
        cluster.up()
        try:
            lab = Lab(Path(folder), cluster)
            for name, (experiment, nodes) in JOBS.items():
                home = Path(folder, f"home of {experiment.replace('/', ' ')}")
                home.mkdir()
                first, *later = [time_to_first_step(lab, experiment, nodes, home) for _ in range(repeats + 1)]
                print(f"{name + ', first job':32s} {first:6.2f} s")
                print(summarize(f"{name}, later jobs", later), flush=True)
        finally:
            cluster.down()


def summarize(name: str, runs: list[float]) -> str:
    return f"{name:32s} {min(runs):6.2f} s, {statistics.median(runs):.2f}, {max(runs):.2f}"


def time_imports(code: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", f"{code}; import os; os._exit(0)"]
    subprocess.run(command, env=os.environ | {"DS_ACCELERATOR": "cpu"}, check=True, capture_output=True)
    return time.perf_counter() - start


def time_to_first_step(lab: Lab, experiment: str, nodes: int, home: Path) -> float:
    start = time.perf_counter()
    asked = (f"--nodes={nodes}", "--gpus-per-node=1")
    # Keep all caches in this home, as on a cluster, so that later jobs reuse what the first job compiled or measured.
    caches = {"HOME": home, "XDG_CACHE_HOME": None, "TORCH_EXTENSIONS_DIR": None}
    job = lab.submit(experiment, "--logging_steps", "1", sbatch=asked, **KNOBS, **caches)
    while "'loss'" not in job.log and time.perf_counter() - start < TIMEOUT:
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    job.wait()
    if job.code != 0:
        sys.exit(f"error: {experiment} ended with {job.code}\n{job}")
    return seconds


if __name__ == "__main__":
    main()
