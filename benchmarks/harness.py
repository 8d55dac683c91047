"""Helpers of the benchmarks: run a training run in its own process, make its model, and describe the machine."""

import importlib.metadata
import json
import os
import shlex
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "scripts"
SAMPLE = REPOSITORY / "data" / "squad_sample.json"
XQUAD = REPOSITORY.parent / "shared" / "data" / "xquad.en.json"  # 1,190 real questions, if they are there
RESULT = "RESULT "  # prefix of the line in which a child process prints its measurements as JSON


def run_training(folder: Path, words: list[str], ranks: int = 0, **variables: str) -> tuple[str, dict]:
    """Run a Python program in `folder`. Return its output and its run record, or {} if there is no record.

    words: path of the program and its arguments.
    ranks: number of processes for launch.py to start; 0 runs the program without launch.py.
    variables: environment variables of the program.

    If the program fails, the benchmark exits with its output.
    """
    launch = [str(SCRIPTS / "launch.py"), f"--nproc-per-node={ranks}"] if ranks else []
    own = {"OMP_NUM_THREADS": "1", "HF_HOME": str(folder / "hf"), "JOB_ID": f"{time.time_ns()}"} | variables
    command = [sys.executable, *launch, *words]
    done = subprocess.run(command, cwd=folder, env=os.environ | own, capture_output=True, text=True, check=False)
    if done.returncode:
        output = f"{done.stdout[-1000:]}\n{done.stderr[-3000:]}"
        sys.exit(f"error: {shlex.join(words)} ended with {done.returncode}:\n{output}")
    record = folder / "results" / f"{own['JOB_ID']}.json"
    return done.stdout, json.loads(record.read_text()) if record.exists() else {}


def read_result(output: str) -> dict:
    """Read the only line that begins with RESULT."""
    (line,) = [line for line in output.splitlines() if line.startswith(RESULT)]
    return json.loads(line.removeprefix(RESULT))


def save_rows(file: Path, results: dict, key: Callable[[dict], Any]) -> None:
    """Replace these rows in the file. If the versions differ, drop all old rows, because they are not comparable.

    key: returns what identifies a row, and orders the rows.
    """
    saved = json.loads(file.read_text())
    measured = [key(row) for row in results["rows"]]
    if saved["versions"] == results["versions"]:
        results["rows"] += [row for row in saved["rows"] if key(row) not in measured]
    results["rows"].sort(key=key)
    file.write_text(json.dumps(results, indent=1) + "\n")


def make_model_folder(folder: Path, config: dict, tokens: int, dataset: Path = SAMPLE) -> None:
    """Write a config.json, and train a tokenizer with `tokens` tokens on the data set."""
    sys.path.insert(0, str(SCRIPTS))
    from config import DataArguments
    from model import train_tokenizer

    train_tokenizer(DataArguments(dataset=str(dataset)), tokens).save_pretrained(folder)
    (folder / "config.json").write_text(json.dumps(config))


def versions() -> dict[str, str]:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}


def commit() -> str:
    words = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].split(":")[1].strip() if names else "unknown CPU"
