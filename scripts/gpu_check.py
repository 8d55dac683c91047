"""Prove the whole ladder on one GPU: each way to train runs, what it saved loads again, how fast it is, what it holds.

    make gpu-check                                                 # or, on a cluster, in experiments/gpu-check:
    sbatch gpu_check.slurm
    python scripts/gpu_check.py --rows zero2 bloom-560m-zero2      # some rows of the table
    python scripts/gpu_check.py --cpu                              # without a GPU: the rows with tiny-bloom

Nothing is downloaded. Results go to results/gpu_check below the folder where it starts: gpu_check.json and gpu_check.md
after each row, and a log per row. A second call goes on where the first one stopped; a row that failed is run again.
Ends with exit code 3 when a row fails, or when there is no GPU.
"""

import argparse
import json
import os
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import torch

from checks.jobs import run_training, without_settings
from estimate.command_line import parse_memory_plan
from estimate.memory import estimate_parts, totals
from reporting.render import grid
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from shared.json_files import read_json, write_json
from shared.paths import REPOSITORY, SAMPLE
from shared.units import GIB

# 1. What is run: train.py with these variables, and each row's own flags

TINY = {  # 16 steps; random weights need a larger learning rate
    "MODEL_NAME": "tiny-bloom",
    "DATASET": str(SAMPLE),
    "TRAIN_SIZE": "64",
    "EVAL_SIZE": "8",
    "NUM_EPOCHS": "2",
    "BATCH_SIZE": "4",
    "GRAD_ACC": "2",
    "LEARNING_RATE": "2e-3",
    "MAX_LENGTH": "256",
    "EM_F1": "False",
}
FULL = {  # the workshop's own sizes, for 10 steps; the model has its whole vocabulary, not the tokenizer
    "MODEL_NAME": "bigscience/bloom-560m",
    "FROM_SCRATCH": "True",
    "TOKENIZER_NAME": "tiny-bloom",
    "DATASET": str(SAMPLE),
    "TRAIN_SIZE": "160",
    "EVAL_SIZE": "4",
    "NUM_EPOCHS": "1",
    "BATCH_SIZE": "4",
    "GRAD_ACC": "4",
    "MAX_LENGTH": "512",
    "EM_F1": "False",
    "SAVE_STRATEGY": "no",
}
RELOADED = {  # another training, which starts from what a row has saved and leaves it as it is
    "TRAIN_SIZE": "8",
    "NUM_EPOCHS": "1",
    "LEARNING_RATE": "1e-12",
    "SAVE_STRATEGY": "no",
}


@dataclass(frozen=True)
class TrainingRow:
    """One training. flags: of train.py. full: bloom-560m, else tiny-bloom. gpu_only: takes minutes on a CPU."""

    name: str
    flags: str = ""
    program: str = "scripts/train.py"
    full: bool = False
    gpu_only: bool = False


ROWS = [  # what tells most comes first, for those who cannot wait for the rest
    TrainingRow("plain", "--em_f1 True"),
    TrainingRow("zero2", "--deepspeed ds_configs/zero2.json"),
    TrainingRow("ds_zero3_offload", "--deepspeed ds_configs/ds_zero3_offload.json"),
    TrainingRow("full_shard", "--fsdp --fsdp_config fsdp_configs/full_shard.json --em_f1 True"),
    TrainingRow("chunked", "--loss chunked"),
    TrainingRow("compiled", "--torch_compile", gpu_only=True),
    TrainingRow("bloom-560m-plain", full=True),
    TrainingRow("bloom-560m-chunked", "--loss chunked", full=True),
    TrainingRow("bloom-560m-sdpa", "--loss chunked --attention sdpa", full=True),
    # each batch has another length: slow if the attention kernel is planned anew for each
    TrainingRow("bloom-560m-sdpa-lengths", "--loss chunked --attention sdpa --padding longest", full=True),
    TrainingRow("bloom-560m-checkpointed", "--loss chunked --activation_checkpointing", full=True),
    TrainingRow("bloom-560m-compiled", "--loss chunked --torch_compile", full=True),
    TrainingRow("bloom-560m-zero2", "--deepspeed ds_configs/zero2.json", full=True),
    TrainingRow("bloom-560m-zero2_cpu_offload", "--deepspeed ds_configs/zero2_cpu_offload.json", full=True),
    TrainingRow(
        "bloom-560m-zero2_cpu_offload_pinned_memory",
        "--deepspeed ds_configs/zero2_cpu_offload_pinned_memory.json",
        full=True,
    ),
    TrainingRow("bloom-560m-ds_zero3_offload", "--deepspeed ds_configs/ds_zero3_offload.json", full=True),
    TrainingRow("bloom-560m-full_shard", "--fsdp --fsdp_config fsdp_configs/full_shard.json", full=True),
    TrainingRow("ddp", program="scripts/launch.py --nproc-per-node=1 scripts/train.py"),
    TrainingRow("zero0", "--deepspeed ds_configs/zero0.json"),
    TrainingRow("zero1", "--deepspeed ds_configs/zero1.json"),
    TrainingRow("zero1_cpu_offload", "--deepspeed ds_configs/zero1_cpu_offload.json"),
    TrainingRow("zero2_cpu_offload", "--deepspeed ds_configs/zero2_cpu_offload.json"),
    TrainingRow("zero2_cpu_offload_pinned_memory", "--deepspeed ds_configs/zero2_cpu_offload_pinned_memory.json"),
    TrainingRow("zero3", "--deepspeed ds_configs/zero3.json"),
    TrainingRow("zero3_cpu_offload", "--deepspeed ds_configs/zero3_cpu_offload.json"),
    TrainingRow("shard_grad_op", "--fsdp --fsdp_config fsdp_configs/shard_grad_op.json"),
    TrainingRow(
        "full_shard_activation_checkpointing",
        "--fsdp --fsdp_config fsdp_configs/full_shard_activation_checkpointing.json",
    ),
    TrainingRow(
        "full_shard_cpu_offload", "--fsdp --fsdp_config fsdp_configs/full_shard_cpu_offload.json", gpu_only=True
    ),
]
LOSS_TOLERANCE = 0.02  # of one training by two methods in 16 bit


# 2. How it is run


def command_of(row: TrainingRow) -> list[str]:
    """As a participant types it, with whole paths: it runs in the folder of the results."""
    words = f"{row.program} {row.flags}".split()
    return [sys.executable, *(str(REPOSITORY / word) if word.endswith((".py", ".json")) else word for word in words)]


def environment_of_rows(folder: Path, cpu: bool) -> dict[str, str]:
    """Return the caller's environment with one GPU or none, and without the caller's knobs and Slurm job."""
    variables = without_settings(os.environ, folder)
    if cpu:
        return variables | {"CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": "0", "FP16": "False"}
    return variables | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def run_row(row: TrainingRow, environment: dict[str, str], folder: Path, timeout: int) -> dict:
    """The row of the table: train, and train on from what was saved."""
    variables = environment | (FULL if row.full else TINY)
    record = run_training(row.name, command_of(row), variables, folder, timeout)
    if record["status"] != "completed":
        return {"status": record["status"], "reason": record["reason"]}
    result = figures(record)
    if not row.full:
        saved = {"MODEL_NAME": str(folder / record["output_dir"])}
        job_id = f"{row.name}_reloaded"
        again = run_training(job_id, command_of(TrainingRow("reloaded")), variables | RELOADED | saved, folder, timeout)
        if again["status"] != "completed":
            return result | {"status": "failed", "reason": again["reason"]}
        result["reloaded_loss"] = figures(again)["eval_loss"]
    return result


# 3. What came of it


def figures(record: dict) -> dict:
    """What the table shows of a run record. None where there is no such figure; the record says why."""
    training = record["train"]
    return {
        "status": "completed",
        "precision": record["knobs"]["precision"]["effective"],
        "train_loss": training["loss_mean"],
        "eval_loss": record["eval"][-1]["loss"],
        "f1": record.get("f1"),
        "samples_per_second": training["steady_samples_per_second"],
        "tokens_per_second": training["steady_tokens_per_second"],
        "mfu_percent": training["mfu_percent"],
        "matmul_peak_tflops": training["matmul_peak_tflops"],
        "peak_gpu_gib": gib(record["peak_gpu_memory"]),
        "pinned_gib": gib(record["peak_pinned_memory"]),
    }


def gib(ranks: list[dict] | None) -> float | None:
    return ranks[0]["allocated_mib"] / 1024 if ranks else None


def disagreement(row: TrainingRow, result: dict, rows: dict[str, dict]) -> dict:
    """What makes a row fail that ended well: it learnt, or saved, something else than the plain Trainer."""
    plain = "bloom-560m-plain" if row.full else "plain"
    wanted = rows.get(plain, result).get("eval_loss", result["eval_loss"])
    for name in ("eval_loss", "reloaded_loss"):
        loss = result.get(name, wanted)
        if abs(loss - wanted) > LOSS_TOLERANCE * wanted:
            reason = f"{COLUMNS[name][0]} is {loss:.3f}, Eval loss of {plain} {wanted:.3f}"
            return {"status": "failed", "reason": reason}
    return {}


COLUMNS = {  # key of a row's result -> header, digits
    "train_loss": ("Train loss", 3),
    "eval_loss": ("Eval loss", 3),
    "reloaded_loss": ("Reloaded", 3),
    "f1": ("F1", 1),
    "samples_per_second": ("Samples/s", 2),
    "tokens_per_second": ("Real tokens/s", 0),
    "mfu_percent": ("MFU (%)", 1),
    "matmul_peak_tflops": ("MFU is of (TFLOP/s)", 3),
    "peak_gpu_gib": ("Peak GPU (GiB)", 2),
    "estimated_gib": ("Estimate (GiB)", 2),
    "pinned_gib": ("Pinned (GiB)", 2),
    "seconds": ("Time (s)", 0),
}


def results_markdown(content: dict) -> str:
    rows = {row.name: content["rows"][row.name] for row in ROWS if row.name in content["rows"]}
    shown = [key for key in COLUMNS if any(result.get(key) is not None for result in rows.values())]
    body = []
    for name, result in rows.items():
        figures = [result.get(key) for key in shown]
        cells = ["" if f is None else f"{f:,.{COLUMNS[key][1]}f}" for key, f in zip(shown, figures, strict=True)]
        body.append([name, result["status"], result.get("precision", ""), *cells])
    header = ["Run", "Status", "Precision", *(COLUMNS[key][0] for key in shown)]
    reasons = [f"- {name}: {result['reason']}" for name, result in rows.items() if "reason" in result]
    sizes = "- bloom-560m: random weights, micro batch 4, accumulation 4, 512 tokens with padding; else tiny-bloom"
    return "\n".join([f"[{machine_in_words(content['machine'])}]\n", grid(header, body), "", *reasons, sizes, ""])


# 4. The machine, and the command line


def machine(environment: dict[str, str], cpu: bool) -> dict:
    """What the table stands for. Asked in another process: a CUDA context in this one would take memory from all rows.

    Raises WorkshopError (exit code 3) where PyTorch sees no GPU.
    """
    question = "import json; from records.writer import hardware; print(json.dumps(hardware(1)))"
    asked = subprocess.run(
        [sys.executable, "-c", question],
        cwd=REPOSITORY / "scripts",
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    here = json.loads(asked.stdout) | {"torch": torch.__version__}
    if not cpu and not here["gpu"]:
        way_out = "run it on a GPU node (sbatch gpu_check.slurm), or without one: make gpu-check FLAGS=--cpu"
        raise WorkshopError("GPU", f"PyTorch sees none on {socket.gethostname()}", way_out, ENVIRONMENT)
    return here


def read_results(path: Path, here: dict) -> dict:
    """What an earlier call left. Raises WorkshopError (exit code 2) if it is of another machine."""
    if not path.exists():
        return {"machine": here, "rows": {}}
    content = read_json(path, "move it away")
    if content["machine"] != here:
        what = f"is of another machine or version: {machine_in_words(content['machine'])}"
        raise WorkshopError(path, what, "move it away, or give another --output")
    return content


def machine_in_words(here: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in here.items() if value)


def main() -> None:
    # an exception, so that the training of the row is ended, too
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [row.name for row in ROWS]
    parser.add_argument("--rows", nargs="+", metavar="ROW", choices=names, help=f"some of: {', '.join(names)}")
    parser.add_argument("--cpu", action="store_true", help="without a GPU: the rows that a CPU runs in seconds")
    parser.add_argument("--output", type=Path, default=Path("results/gpu_check"), help="folder (%(default)s)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one training (%(default)s)")
    arguments = parser.parse_args()
    if arguments.rows:
        wanted = [row for row in ROWS if row.name in arguments.rows]
    else:
        wanted = [row for row in ROWS if not (arguments.cpu and (row.full or row.gpu_only))]
    folder = arguments.output.absolute()
    path = folder / "gpu_check.json"
    environment = environment_of_rows(folder, arguments.cpu)
    content = read_results(path, machine(environment, arguments.cpu))
    rows = content["rows"]
    folder.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        if rows.get(row.name, {}).get("status") == "completed":
            continue
        start = time.monotonic()
        result = run_row(row, environment, folder, arguments.timeout)
        if result["status"] == "completed":
            result |= disagreement(row, result, rows)
        result["seconds"] = time.monotonic() - start
        if row.full:
            settings = parse_memory_plan(command_of(row)[2:], environment=FULL)
            result["estimated_gib"] = totals(estimate_parts(settings), 1)[0] / GIB
        rows[row.name] = result
        write_json(path, content)
        path.with_suffix(".md").write_text(results_markdown(content), encoding="utf-8")
        reason = f" ({result['reason']})" if "reason" in result else ""
        print(f"{row.name}: {result['status']}{reason}, {result['seconds']:.0f} s", flush=True)
    print("", results_markdown(content), f"written: {path}, {path.with_suffix('.md')}", sep="\n")
    if any(rows[row.name]["status"] == "failed" for row in wanted):
        sys.exit(ENVIRONMENT)


if __name__ == "__main__":
    run_program(main)
