"""Prove environment, cluster and model cache before the class; one line per check, exit code 3 if one fails.

    python scripts/preflight.py                                # or make preflight; about a minute
    python scripts/preflight.py --quick                        # without the tiny trainings
    srun --gpus-per-node=1 python scripts/preflight.py         # on a GPU node, where a login node has no GPU
    python scripts/preflight.py --submit                       # three real Slurm jobs too: 1 node, 2 nodes, bare srun

A line is ok, warn, fail or skip, the check, what was found, and what to do. The site is that of the experiments:
SITE=name, or experiments/site. Files go into a temporary folder of the repository, which is kept if a job fails.
"""

import argparse
import contextlib
import io
import os
import shutil
import sys
import tempfile
from pathlib import Path

from checks.jobs import KEPT, dry_runs, slurm_jobs, tiny_jobs
from checks.machine import Lines, cache, gpus, interfaces, load_site, packages, partition
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from shared.paths import REPOSITORY


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model_name", "--model-name", action="append", help="in the cache; repeatable (MODEL_NAME)")
    parser.add_argument("--dataset", help="in the cache (DATASET)")
    parser.add_argument("--quick", action="store_true", help="no tiny trainings")
    parser.add_argument("--submit", action="store_true", help="submit three tiny Slurm jobs and wait for them")
    parser.add_argument("--timeout", type=int, default=1800, help="seconds for a training, or all jobs (%(default)s)")
    arguments = parser.parse_args()
    if arguments.timeout < 1:
        raise WorkshopError("--timeout", f"{arguments.timeout} is too small", "give seconds, for example 1800")
    caller = dict(os.environ)
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=REPOSITORY))
    try:
        states = run_check("site", load_site(folder))
        if "fail" not in states:  # all others depend on it
            models = arguments.model_name or [os.environ.get("MODEL_NAME") or "bigscience/bloom-560m"]
            dataset = arguments.dataset or os.environ.get("DATASET") or "squad"
            checks = {"packages": packages(), "GPUs": gpus(), "interfaces": interfaces()}
            checks |= {"partition": partition(), "cache": cache(models, dataset), "experiments": dry_runs(caller)}
            if not arguments.quick:
                checks["tiny jobs"] = tiny_jobs(folder, arguments.timeout)
            if arguments.submit:
                checks["Slurm jobs"] = slurm_jobs(folder, arguments.timeout, caller)
            for name, lines in checks.items():
                states += run_check(name, lines)
    finally:
        if not (folder / KEPT).exists():
            shutil.rmtree(folder, ignore_errors=True)  # a job that was cancelled may write to the end
    print("preflight: " + ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warn", "fail", "skip")))
    sys.exit(ENVIRONMENT if "fail" in states else 0)


def run_check(name: str, lines: Lines) -> list[str]:
    """Print the lines of a check; their states. An exception is a failed check; what libraries print is dropped."""
    out = sys.stdout
    states = []

    def say(state: str, check: str, *texts: str) -> None:
        states.append(state)
        print(f"{state:<5} {check:<18} {'; '.join(texts)}".replace("\n", " "), file=out, flush=True)

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for line in lines:
                say(*line)
    except (Exception, SystemExit) as error:  # libraries, too, call sys.exit
        say("fail", name, f"{type(error).__name__}: {error}")
    return states


if __name__ == "__main__":
    run_program(main)
