"""Prove the whole ladder on one GPU: each way to train runs, what it saved loads again, how fast it is, what it holds.

    make gpu-check                                                 # or, on a cluster, in experiments/gpu-check:
    sbatch gpu_check.slurm
    python scripts/gpu_check.py --rows zero2 bloom-560m-zero2      # some rows of the table
    python scripts/gpu_check.py --cpu                              # without a GPU: the rows with tiny-bloom

Nothing is downloaded. Results go to results/gpu_check below the folder where it starts: gpu_check.json after each row,
and gpu_check.md. A second call goes on where the first one stopped; a row that failed is run again. Ends with exit
code 3 when a row fails, or when there is no GPU.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from transformers import TrainingArguments

from checks.jobs import tiny_variables, train_once
from checks.machine import OLDER_BUILD, built_for, command, last_line, wrong_pins
from config import Options, own_arguments, parse_command_line, trainer_flags
from data_loader import collator, load_evaluation_set
from errors import ENVIRONMENT, OneLineErrors, WorkshopError, run_program
from estimate_memory import estimate, read_options, totals
from json_files import write_json
from model import load_model, load_tokenizer
from parallel.distributed import free_port
from paths import REPOSITORY, REQUIREMENTS, SAMPLE
from reporting.render import grid
from training.record import hardware
from training.trainer import WorkshopTrainer

# 16 steps of tiny-bloom; random weights need a larger learning rate
TINY: dict[str, object] = {
    "TRAIN_SIZE": 64,
    "EVAL_SIZE": 8,
    "NUM_EPOCHS": 2,
    "BATCH_SIZE": 4,
    "GRAD_ACC": 2,
    "LEARNING_RATE": 2e-3,
}
TINY |= {"MAX_LENGTH": 256, "SAVE_STRATEGY": "epoch", "SAMPLES_PER_GPU": ""}
# The workshop's own sizes, for 10 steps, 3 of them to warm up. The model has its whole vocabulary, not the tokenizer
FULL: dict[str, Any] = {"MODEL_NAME": "bigscience/bloom-560m", "FROM_SCRATCH": True, "TOKENIZER_NAME": "tiny-bloom"}
FULL |= {"TRAIN_SIZE": 160, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "BATCH_SIZE": 4, "GRAD_ACC": 4, "MAX_LENGTH": 512}
FULL |= {"SAMPLES_PER_GPU": ""}
LOSS_TOLERANCE = 0.02  # of one training by two methods in 16 bit, and of its saved weights in fp32
T = TypeVar("T")
TERMINATED = 128 + signal.SIGTERM
BUILD_TIMEOUT = 1200  # seconds


@dataclass(frozen=True)
class TrainingRow:
    """One training. flags: of train.py, config files as seen from the repository."""

    name: str
    flags: tuple[str, ...] = ()
    torchrun: bool = False
    full: bool = False

    @property
    def needs_gpu(self) -> bool:
        return self.full or self.name in ("full_shard_cpu_offload", "compiled")  # on a CPU that takes minutes


def deepspeed(name: str, full: bool = False) -> TrainingRow:
    return TrainingRow(f"bloom-560m-{name}" if full else name, ("--deepspeed", f"ds_configs/{name}.json"), full=full)


def fsdp(name: str, full: bool = False) -> TrainingRow:
    config = ("--fsdp", "--fsdp_config", f"fsdp_configs/{name}.json")
    return TrainingRow(f"bloom-560m-{name}" if full else name, config, full=full)


CHUNKED = ("--loss", "chunked")
FIRST = ("zero2", "ds_zero3_offload")
CONFIGS = [path.stem for path in sorted((REPOSITORY / "ds_configs").glob("*.json"))]
ROWS = [  # what tells most comes first, for those who cannot wait for the rest
    TrainingRow("plain"),
    *(deepspeed(name) for name in FIRST),
    fsdp("full_shard"),
    TrainingRow("chunked", CHUNKED),
    TrainingRow("compiled", ("--torch_compile",)),
    TrainingRow("bloom-560m-plain", full=True),
    TrainingRow("bloom-560m-chunked", CHUNKED, full=True),
    TrainingRow("bloom-560m-checkpointed", (*CHUNKED, "--activation_checkpointing"), full=True),
    TrainingRow("bloom-560m-compiled", (*CHUNKED, "--torch_compile"), full=True),
    deepspeed("zero2", full=True),
    deepspeed("zero2_cpu_offload", full=True),
    deepspeed("zero2_cpu_offload_pinned_memory", full=True),
    deepspeed("ds_zero3_offload", full=True),
    fsdp("full_shard", full=True),
    TrainingRow("ddp", torchrun=True),
    *(deepspeed(name) for name in CONFIGS if name not in FIRST),
    fsdp("shard_grad_op"),
    fsdp("full_shard_activation_checkpointing"),
    fsdp("full_shard_cpu_offload"),
]
SCORED = ("plain", "full_shard")  # EM and F1 cost as much as the training
COLUMNS = {  # key of a row's result -> header, digits
    "train_loss": ("Train loss", 3),
    "eval_loss": ("Eval loss", 3),
    "reloaded_loss": ("Reloaded", 3),
    "f1": ("F1", 1),
    "samples_per_second": ("Samples/s", 2),
    "tokens_per_second": ("Real tokens/s", 0),
    "mfu_percent": ("MFU (%)", 1),
    "peak_gpu_gib": ("Peak GPU (GiB)", 2),
    "estimated_gib": ("Estimate (GiB)", 2),
    "pinned_gib": ("Pinned (GiB)", 2),
    "seconds": ("Time (s)", 0),
}


# 1. The machine


def machine(environment: dict, cpu: bool) -> dict:
    """What the table stands for: a result of another machine or version does not belong into it."""
    versions = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if cpu:
        here = hardware(1)
        return versions | {"profile": "cpu", "gpu": None, "cpu": here["cpu"], "cpus": here["cpus"]}
    answered, driver = command("nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader", timeout=30)
    found = in_a_process_of_its_own(describe_gpu, environment)
    return versions | {"profile": "gpu"} | found | {"driver": driver.split("\n")[0] if answered else None}


def in_a_process_of_its_own(function: Callable[[], T], environment: dict) -> T:
    """Its result, from a process that sees the GPU. This one does not: a CUDA context takes memory from all rows."""
    hidden = dict(os.environ)
    os.environ.update(environment)
    try:
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function).result()
    finally:
        os.environ.clear()
        os.environ.update(hidden)


def describe_gpu() -> dict:
    """Raises WorkshopError (exit code 3) without a GPU that this PyTorch was built for."""
    if not torch.cuda.is_available():
        way_out = "run it on a GPU node (sbatch gpu_check.slurm), or without one: make gpu-check FLAGS=--cpu"
        raise WorkshopError("GPU", f"PyTorch sees none on {socket.gethostname()}", way_out, ENVIRONMENT)
    here = hardware(1)
    capability = torch.cuda.get_device_capability(0)
    if not built_for(capability, torch.cuda.get_arch_list()):
        what = f"torch {torch.__version__} has no code for {here['gpu']} (compute capability {capability})"
        raise WorkshopError("GPU", what, f"{OLDER_BUILD} (docs/environment.md)", ENVIRONMENT)
    names = {name: here[name] for name in ("gpu", "gpu_memory_mib", "cpu", "cpus")}
    return names | {"compute_capability": ".".join(map(str, capability))}


# 2. One row


def run_row(row: TrainingRow, folder: Path, log: Path, environment: dict, arguments: argparse.Namespace) -> dict:
    """Train, and for tiny-bloom load what was saved and judge it by its loss; the row's result."""
    forget(row, folder)
    variables = tiny_variables(folder, environment, not arguments.cpu) | text_values(FULL if row.full else TINY)
    variables |= {"JOB_ID": row.name, "OMP_NUM_THREADS": str(len(os.sched_getaffinity(0)))}
    variables |= {"EM_F1": str(row.name in SCORED)}
    if not train_once(row_words(row), variables, folder, log, arguments.timeout):
        return {"status": "failed", "reason": f"{last_line(log.read_text(errors='replace'))}; read {log}"}
    record = json.loads((folder / "results" / f"{row.name}.json").read_text())
    result = {"status": "completed", "precision": record["knobs"]["precision"]["effective"]}
    result |= {"train_loss": record["train"]["loss_mean"]}
    if record["knobs"]["compiled"]["requested"] and not record["knobs"]["compiled"]["effective"]:
        result |= {"status": "not compiled", "reason": f"{record['missing']['knobs.compiled']}; read {log}"}
    if record["peak_gpu_memory"]:
        result["peak_gpu_gib"] = record["peak_gpu_memory"][0]["allocated_mib"] / 1024
    if record["peak_pinned_memory"]:
        result["pinned_gib"] = record["peak_pinned_memory"][0]["allocated_mib"] / 1024
    if row.full:
        train = record["train"]
        result["samples_per_second"] = train["steady_samples_per_second"]
        result["tokens_per_second"] = train["steady_tokens_per_second"]
        return result | {name: train[name] for name in ("mfu_percent", "matmul_peak_tflops")}
    result["eval_loss"] = record["eval"][-1]["loss"]
    result["reloaded_loss"] = reload(folder / record["output_dir"], log)
    if row.name in SCORED:
        result |= {name: record[name] for name in ("exact_match", "f1")}
    shutil.rmtree(folder / record["output_dir"])
    if not close(result["reloaded_loss"], result["eval_loss"]):
        what = f"the saved model has loss {result['reloaded_loss']:.3f}, the trained one {result['eval_loss']:.3f}"
        result |= {"status": "failed", "reason": f"{what}; read {log}"}
    return result


def close(loss: float, other: float) -> bool:
    return abs(loss - other) <= LOSS_TOLERANCE * other


def compare_with_plain(row: TrainingRow, result: dict, rows: dict[str, dict]) -> None:
    """Let a row fail whose training ended elsewhere than that of the plain Trainer: it learnt something else."""
    reference, key = ("bloom-560m-plain", "train_loss") if row.full else ("plain", "eval_loss")
    wanted = rows.get(reference, {}).get(key)
    if wanted and key in result and not close(result[key], wanted):
        what = f"the loss is {result[key]:.3f}, that of {reference} {wanted:.3f}"
        result |= {"status": "failed", "reason": what}


def row_words(row: TrainingRow) -> list[str]:
    """The command, with whole paths: it runs in the folder of the results."""
    train = [str(REPOSITORY / "scripts" / "train.py")]
    if row.torchrun:
        launch = ["--nproc-per-node=1", "--nnodes=1", "--rdzv-backend=static", "--master-addr=127.0.0.1"]
        train = [str(REPOSITORY / "scripts" / "launch.py"), *launch, f"--master-port={free_port()}", *train]
    flags = [str(REPOSITORY / flag) if flag.endswith(".json") else flag for flag in row.flags]
    return [sys.executable, *train, *flags, *(("--eval_strategy", "no") if row.full else ())]


def text_values(knobs: dict) -> dict[str, str]:
    return {name: str(value) for name, value in knobs.items()}


def forget(row: TrainingRow, folder: Path) -> None:
    """Remove what an earlier attempt left: train.py would refuse to write over it."""
    for path in (folder / "results" / f"{row.name}.json", folder / f"{row.name}.log"):
        path.unlink(missing_ok=True)
    shutil.rmtree(folder / "output" / row.name, ignore_errors=True)


def reload(output: Path, log: Path) -> float:
    """Loss of a saved model on the same questions, in fp32 on the CPU."""
    with log.open("a") as file, contextlib.redirect_stdout(file), contextlib.redirect_stderr(file):
        sizes = ["--eval_size", TINY["EVAL_SIZE"], "--max_length", TINY["MAX_LENGTH"], "--fp16", "False"]
        flags = ["--model_name", output, "--dataset", SAMPLE, "--output_dir", output / "evaluation", *sizes]
        options = parse_command_line("", list(map(str, flags)), gpu=False, environment={})
        model_args, data_args = own_arguments(options)
        args = TrainingArguments(**trainer_flags(options))
        tokenizer = load_tokenizer(model_args, data_args)
        questions = load_evaluation_set(data_args, tokenizer, args)
        model = load_model(model_args, data_args, tokenizer, args.seed)
        batches = collator(tokenizer, data_args)
        trainer = WorkshopTrainer(model=model, args=args, eval_dataset=questions, data_collator=batches)
        return trainer.evaluate()["eval_loss"]


# 3. What was to be expected


def options_of(row: TrainingRow) -> Options:
    """The row as estimate_memory.py reads it."""
    flags = [str(REPOSITORY / flag) if flag.endswith(".json") else flag for flag in row.flags]
    return read_options(flags, environment=text_values(FULL))


def expected(row: TrainingRow) -> dict:
    if not row.full:
        return {}
    return {"estimated_gib": totals(estimate(options_of(row)), 1)[0] / 2**30}


# 4. The table


def results_table(content: dict) -> str:
    keys = [key for key in COLUMNS if any(result.get(key) is not None for result in content["rows"].values())]
    body = []
    for name, result in content["rows"].items():
        values = (result.get(key) for key in keys)
        texts = ["" if v is None else f"{v:,.{COLUMNS[key][1]}f}" for key, v in zip(keys, values, strict=True)]
        body.append([name, result["status"], *texts])
    return grid(["Run", "Status", *(COLUMNS[key][0] for key in keys)], body)


def remarks_on_results(content: dict) -> list[str]:
    """Reasons of what is missing, what the pinned and the other row say of each other, and the time of all rows."""
    rows = content["rows"]
    lines = [f"{name}: {result['reason']}" for name, result in rows.items() if result.get("reason")]
    for name, result in rows.items():
        if "samples_per_second" in result and result["samples_per_second"] is None:
            lines.append(f"{name}: no rate, too few steps after the warm-up")
    speeds = [rows.get(f"bloom-560m-zero2_cpu_offload{kind}", {}).get("samples_per_second")
              for kind in ("_pinned_memory", "")]  # fmt: skip
    if all(speeds):
        gain = 100 * (speeds[0] / speeds[1] - 1)
        lines.append(
            f"ZeRO-2 with offload: {speeds[0]:.2f} samples/s pinned, {speeds[1]:.2f} not pinned: {gain:+.0f} %"
        )
    seconds = sum(result.get("seconds", 0) for result in rows.values())
    precisions = ", ".join(sorted({result["precision"] for result in rows.values() if "precision" in result}))
    return [*lines, f"{len(rows)} rows in {seconds / 60:.1f} minutes" + (f", in {precisions}" if precisions else "")]


def headline(content: dict) -> str:
    here = content["machine"]
    if here["profile"] == "cpu":
        return f"{here['cpus']} CPU cores, {here['cpu']}, torch {here['torch']}, tiny-bloom"
    parts = [f"{here['gpu']}, {here['gpu_memory_mib'] / 1024:.0f} GiB", f"driver {here['driver']}"]
    parts += [f"torch {here['torch']}", f"{here['cpus']} CPU cores, {here['cpu']}"]
    peaks = {row["matmul_peak_tflops"] for row in content["rows"].values() if row.get("matmul_peak_tflops")}
    if peaks:
        parts.append(f"peak {max(peaks):.0f} TFLOP/s")
    return ", ".join(parts)


def results_markdown(content: dict) -> str:
    lines = remarks_on_results(content)
    if content["machine"]["profile"] == "gpu":
        lines.append(
            "bloom-560m: random weights, micro batch 4, accumulation 4, 512 tokens with padding; else tiny-bloom"
        )
    body = "\n".join(f"- {line}" for line in lines)
    return f"[{headline(content)}]\n\n{results_table(content)}\n\n{body}\n"


def load_results(path: Path, here: dict) -> dict:
    """What an earlier call left, if it is of the same machine and versions."""
    if not path.exists():
        return {"machine": here, "rows": {}}
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        other = [f"{key} {content['machine'].get(key)}" for key in here if content["machine"].get(key) != here[key]]
    except (ValueError, KeyError, TypeError, AttributeError):
        raise WorkshopError(path, "is no result of this script", "move it away, or give another --output") from None
    if other:
        raise WorkshopError(
            path, f"is of another machine or version ({', '.join(other)})", "move it away, or give another --output"
        )
    return content


# 5. The command line


def parse(argv: list[str] | None = None) -> argparse.Namespace:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="ROW", help=f"some of: {', '.join(row.name for row in ROWS)}")
    parser.add_argument("--cpu", action="store_true", help="the rows that a CPU can run")
    parser.add_argument("--output", type=Path, default=Path("results/gpu_check"), help="folder (%(default)s)")
    parser.add_argument("--timeout", type=int, default=600, help="seconds for one row (%(default)s)")
    parser.add_argument("--any_version", "--any-version", action="store_true", help="go on with other packages")
    arguments = parser.parse_args(argv)
    known = [row.name for row in ROWS if not (arguments.cpu and row.needs_gpu)]
    for name in arguments.rows or []:
        if name not in known:
            raise WorkshopError(f"--rows {name}", "there is no such row here", f"choose from {', '.join(known)}")
    if arguments.timeout < 1:
        raise WorkshopError("--timeout", f"{arguments.timeout} is too small", "give seconds, for example 600")
    arguments.rows = arguments.rows or known
    return arguments


def check_packages(any_version: bool) -> None:
    if wrong := wrong_pins(REQUIREMENTS.read_text()):
        if not any_version:
            way_out = "python -m pip install -r requirements.txt, or go on with --any_version"
            raise WorkshopError("packages", ", ".join(wrong), way_out, ENVIRONMENT)
        print(f"packages: {', '.join(wrong)}", flush=True)


def environment_of_rows(cpu: bool) -> dict[str, str]:
    """The caller's, with one GPU, also where the job has several, or none."""
    if cpu:
        return dict(os.environ) | {"CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": "0"}
    return dict(os.environ) | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def compile_optimizers(environment: dict) -> None:
    """Before the first DeepSpeed row, which would look slow. Of a build that fails the rows that need it tell."""
    words = [sys.executable, str(REPOSITORY / "scripts" / "build_ops.py")]
    try:
        subprocess.run(words, env=environment, timeout=BUILD_TIMEOUT, check=False)
    except subprocess.TimeoutExpired:
        what = f"no end after {BUILD_TIMEOUT} s"
        raise WorkshopError("DeepSpeed build", what, "look for another build on this machine", ENVIRONMENT) from None


def main() -> None:
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(TERMINATED))  # and the row's processes are ended
    arguments = parse()
    check_packages(arguments.any_version)
    environment = environment_of_rows(arguments.cpu)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # this process only estimates and scores, on the CPU
    here = machine(environment, arguments.cpu)
    folder = arguments.output.absolute()
    path = folder / "gpu_check.json"
    content = load_results(path, here)
    folder.mkdir(parents=True, exist_ok=True)
    print(headline(content), flush=True)
    compile_optimizers(environment)
    for row in ROWS:
        if row.name in arguments.rows and content["rows"].get(row.name, {}).get("status") != "completed":
            result = one_row(row, folder, arguments, environment, content)
            content["rows"][row.name] = result
            content["rows"] = {r.name: content["rows"][r.name] for r in ROWS if r.name in content["rows"]}
            write_json(path, content)
            reason = f" ({result['reason']})" if "reason" in result else ""
            print(f"{row.name}: {result['status']}{reason}, {result.get('seconds', 0):.0f} s", flush=True)
    (folder / "gpu_check.md").write_text(results_markdown(content), encoding="utf-8")
    print(
        "",
        results_table(content),
        *remarks_on_results(content),
        f"written: {path}, {path.with_suffix('.md')}",
        sep="\n",
    )
    sys.exit(ENVIRONMENT if any(content["rows"][name]["status"] == "failed" for name in arguments.rows) else 0)


def one_row(row: TrainingRow, folder: Path, arguments: argparse.Namespace, environment: dict, content: dict) -> dict:
    estimated = expected(row)
    there = content["machine"].get("gpu_memory_mib")
    if estimated and estimated["estimated_gib"] > there / 1024:
        reason = f"{estimated['estimated_gib']:.1f} GiB needed by the estimate, the GPU has {there / 1024:.1f}"
        return estimated | {"status": "left out", "reason": reason}
    start = time.monotonic()
    log = folder / f"{row.name}.log"
    try:
        result = run_row(row, folder, log, environment, arguments)
    except WorkshopError as error:  # a model that cannot be loaded
        result = {"status": "failed", "reason": f"{error}; read {log}"}
    except Exception as error:  # a record that lacks something
        result = {"status": "failed", "reason": f"{type(error).__name__}: {error}; read {log}"}
    compare_with_plain(row, result, content["rows"])
    return result | estimated | {"seconds": time.monotonic() - start}


if __name__ == "__main__":
    run_program(main)
