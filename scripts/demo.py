"""One small training by four methods on this machine: equal losses, and what each rank holds of the model.

    python scripts/demo.py      # or make demo, which installs what it needs first

These are the experiments below experiments/demo, as participants run them, with SITE=laptop. It takes a minute or two.
"""

import argparse
import os
import subprocess
import textwrap
import time
from pathlib import Path

from reporting.definitions import table_definition
from reporting.metrics import metric_value
from reporting.render import grid, table_lines
from reporting.report_folder import write_report
from reporting.runs import Run, read_run
from reporting.tables import build_table
from shared.errors import run_program
from shared.paths import REPOSITORY

METHODS = {
    "plain": "one process, which holds everything",
    "ddp": "DDP: two ranks, each with a copy of the model and half of the questions",
    "zero3": "DeepSpeed ZeRO-3: two ranks, each holds half of the model, and gathers the rest when it computes",
    "fsdp": "FSDP: the same idea in PyTorch alone",
}
NAMES = {"ddp": "DDP", "zero3": "ZeRO-3", "fsdp": "FSDP"}
HELD = {"parameters": "held_parameters", "gradients": "held_gradients", "optimizer state": "held_optimizer_state"}
EQUAL = 1e-4  # of the loss: sums in another order differ behind that
SHOWN_LINES = ("step ", "error:", "missing: psrecord")  # these lines of a run's output; its log has all lines
NEXT = """
Next: the first steps in README.md, then docs/introduction.md."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all of it runs on the CPU: two ranks would need two GPUs
    job_id = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    runs = {}
    print("A tiny BLOOM learns to answer questions about texts (SQuAD), in four trainings that differ in one thing:")
    print("how parameters, gradients and optimizer state are divided over the ranks, which are processes.")
    for number, (method, what) in enumerate(METHODS.items(), start=1):
        print(f"\n{number} of {len(METHODS)}: {what}\n  loads PyTorch and the model", flush=True)
        folder = REPOSITORY / "experiments" / "demo" / method
        code = train(folder, job_id)
        if code == 0:
            runs[method] = read_run(folder / "results" / f"{job_id}.json")
        else:
            log = os.path.relpath(folder / "log" / f"demo_{method}_{job_id}.out")
            print(f"  failed with exit code {code}: read {log}")
    if runs:
        report = REPOSITORY / "build" / job_id
        write_report([REPOSITORY / "experiments" / "demo"], report, all_runs=False)
        page = os.path.relpath(report / "index.html")
        print(f"\n{table(runs)}\n\n{conclusions(runs)}\n{NEXT}\nWith curves, in a browser: {page}")
    raise SystemExit(len(runs) < len(METHODS) or not are_equal(losses_of(runs)))


def train(folder: Path, job_id: str) -> int:
    """Run an experiment's script, and show its progress. Returns its exit code."""
    # Inside salloc the script would take Slurm's job id and number of ranks
    variables = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    variables |= {"SITE": "laptop", "JOB_ID": job_id, "OMP_NUM_THREADS": "1"}
    job = subprocess.Popen(
        ["bash", "demo.slurm"],
        cwd=folder,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    for line in job.stdout or ():
        if line.startswith(SHOWN_LINES):
            print(f"  {line}", end="", flush=True)
    return job.wait()


def table(runs: dict[str, Run]) -> str:
    """Show the runs side by side, as in the report."""
    by_experiment = {f"demo/{method}": [runs[method]] if method in runs else [] for method in METHODS}
    found = build_table(table_definition("demo"), by_experiment)
    heads, rows = table_lines(found)
    labels = [row.label for row in found.rows]
    return f"{grid([heads[0], *labels], [row[:-1] for row in rows])}\n\n{textwrap.fill(found.definition.note, 100)}"


def conclusions(runs: dict[str, Run]) -> str:
    """Say in words what the runs measured."""
    losses = losses_of(runs)
    if len(runs) < len(METHODS):
        loss = f"Only {len(runs)} of {len(METHODS)} trainings finished, so nothing is said about equal losses."
    elif are_equal(losses):
        loss = f"All train losses are {losses[0]:.4f}: how a training is divided does not change what it computes."
    else:
        loss = f"The train losses go from {min(losses):.4f} to {max(losses):.4f}. They should be equal."
    lines = [loss]
    plain = runs.get("plain")
    for method, run in runs.items():
        if plain and run is not plain:
            shares = [
                f"{metric_value(metric, run) / metric_value(metric, plain):.0%} of the {part}"
                for part, metric in HELD.items()
            ]
            lines.append(f"Of what the one process holds, a rank of {NAMES[method]} holds {', '.join(shares)}.")
    return "\n".join(lines)


def losses_of(runs: dict[str, Run]) -> list[float]:
    return [metric_value("train_loss", run) for run in runs.values()]


def are_equal(losses: list[float]) -> bool:
    return max(losses, default=0) - min(losses, default=0) <= EQUAL * min(losses, default=0)


if __name__ == "__main__":
    run_program(main)
