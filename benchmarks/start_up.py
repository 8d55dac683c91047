"""Seconds from `sbatch` to a job's first optimizer step, with tiny-bloom, on the tests' Slurm cluster (as root on Debian).

    python benchmarks/start_up.py                 # medians of three jobs each
    python benchmarks/start_up.py --repeats 5

The clock stops when the first loss stands in the log. A job before the first one fills the caches. Each node has one
GPU that nothing uses, the ranks train on this machine's CPU. What the imports of the training take is measured beside
them, since they are no choice of the job script's. The results, with commit and machine, are in docs/efficiency.md.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parent.parent
for folder in ("scripts", "tests", "tests/slurm"):
    sys.path.insert(0, str(REPOSITORY / folder))

from cluster import Cluster  # noqa: E402
from jobs import Lab  # noqa: E402

JOBS = {
    "plain, one GPU": ("baseline", 1),
    "ZeRO-2, one GPU": ("deepspeed-single-gpu/zero_2", 1),
    "ZeRO-2, two nodes": ("deepspeed-multi-node/2_nodes", 2),
}
KNOBS = {"MODEL_NAME": "tiny-bloom", "TRAIN_SIZE": 64, "EVAL_SIZE": 8, "NUM_EPOCHS": 1, "EM_F1": False}
KNOBS |= {"SAVE_STRATEGY": "no", "BATCH_SIZE": 4, "GRAD_ACC": 1, "MAX_LENGTH": 64}
LONGEST = 300  # seconds; a job that ended without a step fails below
IMPORTS = {
    "plain": "import train",
    "ZeRO-2": "import train, deepspeed",
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    repeats = parser.parse_args().repeats
    for name, code in IMPORTS.items():
        seconds = statistics.median(seconds_of_imports(code) for _ in range(repeats))
        print(f"{f'imports of the training, {name}':32s} {seconds:6.2f} s", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        cluster = Cluster(f"{folder}/slurm", nodes=2)
        cluster.up()
        try:
            lab = Lab(Path(folder), cluster)
            for name, (experiment, nodes) in JOBS.items():
                runs = [seconds_to_first_step(lab, experiment, nodes) for _ in range(repeats + 1)][1:]
                print(f"{name:32s} {statistics.median(runs):6.2f} s, {min(runs):.2f} to {max(runs):.2f}", flush=True)
        finally:
            cluster.down()


def seconds_of_imports(code: str) -> float:
    start = time.perf_counter()
    command = [sys.executable, "-c", f"import sys; sys.path.insert(0, 'scripts'); {code}; import os; os._exit(0)"]
    subprocess.run(command, cwd=REPOSITORY, check=True, capture_output=True)
    return time.perf_counter() - start


def seconds_to_first_step(lab: Lab, experiment: str, nodes: int) -> float:
    start = time.perf_counter()
    job = lab.submit(experiment, "--logging_steps", "1", sbatch=(f"--nodes={nodes}", "--gpus-per-node=1"), **KNOBS)
    while "'loss'" not in job.log and time.perf_counter() - start < LONGEST:
        time.sleep(0.02)
    seconds = time.perf_counter() - start
    job.wait()
    if job.exit_code != 0:
        sys.exit(f"error: {experiment} ended with {job.exit_code}\n{job}")
    return seconds


if __name__ == "__main__":
    main()
