"""Check the environment, the cluster and the model cache before the class.

    python scripts/preflight.py                                # or make preflight; two minutes on a laptop
    python scripts/preflight.py --quick                        # without the rows of gpu_check.py
    srun --gpus-per-node=1 python scripts/preflight.py         # on a GPU node, if the login node has no GPU
    python scripts/preflight.py --submit                       # also three real Slurm jobs: 1 node, 2 nodes, bare srun

Each check prints a line: ok, warn, fail or skip, the name of the check, the finding, and the remedy. The exit code is 3
if a check fails. The site is chosen as for the experiments: by SITE=name, or by the file experiments/site. Files go
into a temporary folder in the repository. The folder is kept if a job fails.

If the site has a CONTAINER, start preflight.py outside, as a job starts. The checks that need PyTorch run inside.
"""

import argparse
import contextlib
import io
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from checks.jobs import KEPT, dry_runs, slurm_jobs, tiny_jobs
from checks.machine import Lines, cache, gpus, interfaces, load_site, packages, partition
from config import COUNT
from job.on_node import end_with_parent, handle_signals, python_command
from shared.errors import ENVIRONMENT, OneLineErrors, run_program
from shared.paths import REPOSITORY

STATES = ("ok", "warn", "fail", "skip")
NEED_TORCH = ("packages", "GPUs", "cache", "tiny jobs")


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    text = "model that the cache must hold; repeatable (default: variable MODEL_NAME)"
    parser.add_argument("--model_name", "--model-name", action="append", help=text)
    parser.add_argument("--dataset", help="data set that the cache must hold (default: variable DATASET)")
    parser.add_argument("--quick", action="store_true", help="skip the rows of gpu_check.py")
    parser.add_argument("--submit", action="store_true", help="submit three tiny Slurm jobs and wait for them")
    text = "time limit for each training run, and for all Slurm jobs, in seconds (%(default)s)"
    parser.add_argument("--timeout", type=COUNT.whole_number, default=1800, help=text)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)  # `inside` sets it in the container
    arguments = parser.parse_args()
    caller = dict(os.environ)
    handle_signals(signal.default_int_handler)  # end as after Ctrl-C, so that no job and no folder is left
    folder = Path(tempfile.mkdtemp(prefix=".preflight-", dir=REPOSITORY))
    try:
        states = [] if arguments.inside else run_check("site", load_site(folder))
        if "fail" not in states:  # all other checks depend on the site
            models = arguments.model_name or [os.environ.get("MODEL_NAME") or "bigscience/bloom-560m"]
            dataset = arguments.dataset or os.environ.get("DATASET") or "squad"
            checks = {"packages": packages(), "GPUs": gpus(), "interfaces": interfaces()}
            checks |= {"partition": partition(), "cache": cache(models, dataset), "experiments": dry_runs(caller)}
            if not arguments.quick:
                checks["tiny jobs"] = tiny_jobs(folder, arguments.timeout)
            if arguments.submit:
                checks["Slurm jobs"] = slurm_jobs(folder, arguments.timeout, caller)
            if arguments.inside:
                checks = {name: lines for name, lines in checks.items() if name in NEED_TORCH}
            elif os.environ.get("CONTAINER"):
                outside = {name: lines for name, lines in checks.items() if name not in NEED_TORCH}
                checks = {"container": inside(sys.argv[1:])} | outside
            for name, lines in checks.items():
                states += run_check(name, lines)
    finally:
        if not (folder / KEPT).exists():
            shutil.rmtree(folder, ignore_errors=True)  # a cancelled job may still write into the folder
    if not arguments.inside:
        print("preflight: " + ", ".join(f"{states.count(state)} {state}" for state in STATES))
    sys.exit(ENVIRONMENT if "fail" in states else 0)


def inside(words: list[str]) -> Lines:
    """Start this program with these arguments in the site's container, and yield its lines."""
    last = "no output"
    pipes: Any = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(python_command(__file__, "--inside", *words), preexec_fn=end_with_parent, **pipes) as process:
        assert process.stdout
        for last in process.stdout:
            if (state := last[:5].strip()) in STATES:
                yield state, last[6:24].strip(), last[25:].strip()
    if process.returncode not in (0, ENVIRONMENT):
        yield "fail", "container", last.strip(), "correct CONTAINER in the site file"


def run_check(name: str, lines: Lines) -> list[str]:
    """Print the lines of a check and return their states.

    An exception counts as a failed check. Output of libraries is dropped.
    """
    out = sys.stdout
    states = []

    def print_line(state: str, check: str, *texts: str) -> None:
        states.append(state)
        print(f"{state:<5} {check:<18} {'; '.join(texts)}".replace("\n", " "), file=out, flush=True)

    try:
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            for line in lines:
                print_line(*line)
    except (Exception, SystemExit) as error:  # some libraries call sys.exit
        print_line("fail", name, f"{type(error).__name__}: {error}")
    return states


if __name__ == "__main__":
    run_program(main)
