"""Prove environment, cluster, model cache and disk before the class; one line per check, exit code 3 if one fails.

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
from collections.abc import Callable
from pathlib import Path

from checks.files import cache, configs, disk
from checks.jobs import slurm_jobs, tiny_jobs
from checks.machine import Lines, check_site, environment, gpus, load_site, nccl
from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from paths import REPOSITORY


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
    states = []
    out = sys.stdout

    def say(state: str, name: str, found: str, way_out: str = "") -> None:
        states.append(state)
        text = f"{found}; {way_out}" if way_out else found
        print(f"{state:<5} {name:<18} {text}".replace("\n", " "), file=out, flush=True)

    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=REPOSITORY))
    try:
        caller = dict(os.environ)
        site = load_site(folder)
        arguments.model_name = arguments.model_name or [os.environ.get("MODEL_NAME") or "bigscience/bloom-560m"]
        arguments.dataset = arguments.dataset or os.environ.get("DATASET") or "squad"
        checks = {"environment": environment, "GPUs": gpus, "NCCL": lambda: nccl(site)}
        checks |= {"site": lambda: check_site(site), "cache": lambda: cache(arguments)}
        checks |= {"disk": lambda: disk(arguments), "configs": configs}
        if not arguments.quick:
            checks["tiny jobs"] = lambda: tiny_jobs(folder, arguments.timeout)
        if arguments.submit:
            checks["Slurm jobs"] = lambda: slurm_jobs(folder, arguments.timeout, caller)
        for name, check in checks.items():
            run_check(name, check, say)
    finally:
        if not any((folder / "kept").glob("*")):
            shutil.rmtree(folder, ignore_errors=True)  # a job that was cancelled may write to the end
    print("preflight: " + ", ".join(f"{states.count(state)} {state}" for state in ("ok", "warn", "fail", "skip")))
    sys.exit(ENVIRONMENT if "fail" in states else 0)


def run_check(name: str, check: Callable[[], Lines], say: Callable) -> None:
    """Pass a check's lines to `say`. What libraries print meanwhile is dropped; an exception is a failed check."""
    noise = io.StringIO()
    try:
        with contextlib.redirect_stdout(noise), contextlib.redirect_stderr(noise):
            for line in check():
                say(*line)
    except WorkshopError as error:
        say("fail", name, str(error))
    except (Exception, SystemExit) as error:  # libraries, too, call sys.exit
        say("fail", name, f"{type(error).__name__}: {error}", "correct the installation: requirements.txt")


if __name__ == "__main__":
    run_program(main)
