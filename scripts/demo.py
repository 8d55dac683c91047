"""Train one small model by four methods on this machine, and compare losses and model state per rank.

    python scripts/demo.py      # or make demo, which first installs the packages

The demo runs the experiments in experiments/demo with SITE=laptop, and takes a minute or two. In a fifth training, the
same model memorises 8 questions.
"""

import argparse
import os
import re
import subprocess
import sys
import textwrap
import time
from pathlib import Path

from checks.jobs import drop_settings
from reporting.definitions import table_definition
from reporting.metrics import HELD, metric_value
from reporting.render import grid, table_lines
from reporting.report_folder import write_report
from reporting.runs import ReportedRun, read_run
from reporting.tables import build_table
from shared.errors import run_program
from shared.paths import REPOSITORY, SAMPLE

METHODS = {
    "plain": "one process, which holds the whole model",
    "ddp": "DDP: two ranks, each with a copy of the model and half of the questions",
    "zero3": "DeepSpeed ZeRO-3: two ranks, each holds half of the model and gathers the rest for its computation",
    "fsdp": "FSDP: the same idea in plain PyTorch",
}
NAMES = {"ddp": "DDP", "zero3": "ZeRO-3", "fsdp": "FSDP"}
# The fifth training: one optimizer step per epoch, on the same questions that are asked afterwards. It is not compared
# with the others, because after 80 steps the rounding of each method would show in the loss
MEMORISE = {
    "MODEL_NAME": "tiny-bloom",
    "DATASET": str(SAMPLE),
    "EVAL_DATASET": str(SAMPLE),
    "TRAIN_SIZE": "8",
    "EVAL_SIZE": "8",
    "NUM_EPOCHS": "80",
    "BATCH_SIZE": "8",
    "GRAD_ACC": "1",
    "LEARNING_RATE": "2e-3",
    "LABELS": "answer",
    "PADDING": "longest",
    "SAVE_STRATEGY": "no",
    "SHOW": "8",
    "OMP_NUM_THREADS": "1",
}
ANSWER = re.compile(r"^question: (.*)\n  right answer: (.*)\n  model's answer: (.*)$", re.MULTILINE)
LOSS_TOLERANCE = 1e-4  # relative; each method adds numbers in its own order, which changes the last digits of the loss
SHOWN_LINES = ("step ", "error:", "missing: psrecord")  # beginnings of the lines to print; the log has all lines
NEXT = """
Next: the first steps in README.md, then docs/introduction.md."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.parse_args()
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # use the CPU: two ranks would need two GPUs
    job_id = f"demo-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    runs = {}
    print("A tiny BLOOM learns to answer questions about texts (SQuAD) in four training runs. They differ only in how")
    print("parameters, gradients and optimizer state are divided over the ranks. Each rank is a process.")
    for number, (method, description) in enumerate(METHODS.items(), start=1):
        print(f"\n{number} of {len(METHODS)}: {description}\n  loading PyTorch and the model", flush=True)
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
        print(f"\n{table(runs)}\n\n{conclusions(runs)}\nWith curves, in a browser: {page}")
    memorised = memorise(REPOSITORY / "build" / f"{job_id}-memorised")
    print(NEXT)
    raise SystemExit(len(runs) < len(METHODS) or not are_equal(train_losses(runs)) or not memorised)


def train(folder: Path, job_id: str) -> int:
    """Run an experiment's script and show its progress. Return the script's exit code."""
    # Inside salloc, the script would otherwise use the job id and the number of ranks of that Slurm job
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


def memorise(folder: Path) -> bool:
    """Train on 8 questions until the model has memorised them, and print one answer before and after.

    evaluate.py prints the answers of the untrained model. It runs at the same time as train.py, in `folder`. Return
    whether the trained model has learned an answer.
    """
    print(f"\nOne more training: {MEMORISE['NUM_EPOCHS']} steps on the same 8 questions", flush=True)
    folder.mkdir(parents=True)
    answers = {}
    programs = {}
    for script in ("evaluate.py", "train.py"):
        with open(folder / f"{script}.log", "w") as log:
            programs[script] = subprocess.Popen(
                [sys.executable, REPOSITORY / "scripts" / script, "--eval_strategy", "no"],
                cwd=folder,
                env=drop_settings(os.environ, folder) | MEMORISE,
                stdout=log,
                stderr=subprocess.STDOUT,
            )
    codes = {script: program.wait() for script, program in programs.items()}
    for script, code in codes.items():
        log_file = folder / f"{script}.log"
        if code:
            print(f"  failed with exit code {code}: read {os.path.relpath(log_file)}")
            return False
        answers[script] = ANSWER.findall(log_file.read_text())
    known = [n for n, (_, right, answer) in enumerate(answers["train.py"]) if answer in right.split(" | ")]
    if not known:
        print("  The model has not learnt any of the 8 answers.")
        return False
    (question, _, before), (_, _, after) = (answers[script][known[0]] for script in programs)
    print(f"  question:       {question}")
    print(f"  answer before:  {before}")
    print(f"  answer after:   {after}")
    print(f"The model has memorised {len(known)} of the 8 answers. It has seen no other questions.")
    return True


def table(runs: dict[str, ReportedRun]) -> str:
    """Return the report's table of the runs, with one column per method."""
    by_experiment = {f"demo/{method}": [runs[method]] if method in runs else [] for method in METHODS}
    found = build_table(table_definition("demo"), by_experiment)
    heads, lines = table_lines(found)
    labels = [row.label for row in found.rows]
    shown = grid([heads[0], *labels], [line[: 1 + len(labels)] for line in lines])
    return f"{shown}\n\n{textwrap.fill(found.definition.note, 100)}"


def conclusions(runs: dict[str, ReportedRun]) -> str:
    """Return sentences that compare the losses, and each method's model state per rank with one process."""
    losses = train_losses(runs)
    if len(runs) < len(METHODS):
        loss = f"Only {len(runs)} of {len(METHODS)} training runs finished, so their losses are not compared."
    elif are_equal(losses):
        loss = f"All train losses are {losses[0]:.4f}: ranks that share the work compute the same."
    else:
        loss = f"The train losses range from {min(losses):.4f} to {max(losses):.4f}. They should be equal."
    lines = [loss]
    plain = runs.get("plain")
    for method, run in runs.items():
        if plain and run is not plain:
            shares = [
                f"{metric_value(metric, run) / metric_value(metric, plain):.0%} of the {part}"
                for part, metric in HELD.items()
            ]
            lines.append(f"Compared with one process, a rank of {NAMES[method]} holds {', '.join(shares)}.")
    return "\n".join(lines)


def train_losses(runs: dict[str, ReportedRun]) -> list[float]:
    return [metric_value("train_loss", run) for run in runs.values()]


def are_equal(losses: list[float]) -> bool:
    return max(losses, default=0) - min(losses, default=0) <= LOSS_TOLERANCE * min(losses, default=0)


if __name__ == "__main__":
    run_program(main)
