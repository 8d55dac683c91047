"""Check every way to train on one GPU: training, loading the saved model, speed and memory.

    make gpu-check                                                 # or, on a cluster, in experiments/gpu-check:
    sbatch gpu_check.slurm
    python scripts/gpu_check.py --rows zero2 bloom-560m-zero2      # only some rows of the table
    python scripts/gpu_check.py --cpu                              # without a GPU: only rows with tiny-bloom
    python scripts/gpu_check.py --ranks 4                          # every strategy with 4 ranks

With --ranks, ranks share a GPU if there are fewer GPUs than ranks. All rows are in fp32, and their losses must equal
those of one rank. The bytes of model state that each rank holds must equal the estimate.

Nothing is downloaded. The script writes a log for each row, and updates gpu_check.json and gpu_check.md after each row.
All files go into results/gpu_check in the current folder, with --ranks 4 into results/gpu_check_4_ranks. A second call
continues where the first one stopped, and runs failed rows again. The exit code is 3 if a row fails or if there is no
GPU.
"""

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

import psutil
import torch

from checks.jobs import drop_settings, run_training
from config import COUNT
from estimate.command_line import parse_memory_plan
from estimate.memory import MemoryPart, estimate_parts, totals
from estimate.predict_from_record import predicted_parts
from reporting.render import grid
from shared.errors import ENVIRONMENT, STOPPED, OneLineErrors, WorkshopError, run_program
from shared.json_files import read_json, write_json
from shared.paths import REPOSITORY, SAMPLE
from shared.units import GIB, MIB

# 1. The training runs: train.py with these variables and each row's own flags

TINY = {  # 16 steps; random weights need a larger learning rate than pretrained ones
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
FULL = {  # the workshop's own sizes, for 10 steps; the model has its full vocabulary, and the tokenizer is bundled
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
RELOADED = {  # a second training, which starts from a row's saved model and hardly changes it
    "TRAIN_SIZE": "8",
    "NUM_EPOCHS": "1",
    "LEARNING_RATE": "1e-12",
    "SAVE_STRATEGY": "no",
}


@dataclass(frozen=True)
class TrainingRow:
    """A training run to check.

    flags: the flags of train.py. full: train bloom-560m instead of tiny-bloom. gpu_only: skip it on a CPU.
    equal_to: the row with equal losses. The default is the plain Trainer's row. ranks: its number with --ranks,
    otherwise 0. disturbed: what happens at step 8, "stop" or "hang".
    """

    name: str
    flags: str = ""
    program: str = "scripts/train.py"
    full: bool = False
    gpu_only: bool = False
    equal_to: str = ""
    ranks: int = 0
    disturbed: str = ""

    @property
    def reference(self) -> str:
        return self.equal_to or ("bloom-560m-plain" if self.full else "plain")


# tiny-bloom's frozen weights are random, so its adapters need a larger learning rate
LORA = "--lora_rank 8 --learning_rate 1e-2"
ALL = "--bf16 --loss chunked --attention sdpa --padding none --gradient_accumulation_steps 1"  # as in efficiency/all
ROWS = [  # the most informative rows come first, so that an interrupted check is still useful
    TrainingRow("plain", "--em_f1 True"),
    TrainingRow("zero2", "--deepspeed ds_configs/zero2.json"),
    TrainingRow("ds_zero3_offload", "--deepspeed ds_configs/ds_zero3_offload.json"),
    TrainingRow("full_shard", "--fsdp --fsdp_config fsdp_configs/full_shard.json --em_f1 True"),
    TrainingRow("chunked", "--loss chunked"),
    TrainingRow("compiled", "--torch_compile", gpu_only=True),
    TrainingRow("lora", f"{LORA} --loss chunked", equal_to="lora"),
    TrainingRow("lora_zero3", f"{LORA} --deepspeed ds_configs/zero3.json", equal_to="lora"),
    TrainingRow("lora_full_shard", f"{LORA} --fsdp --fsdp_config fsdp_configs/full_shard.json", equal_to="lora"),
    TrainingRow("bloom-560m-plain", full=True),
    TrainingRow("bloom-560m-chunked", "--loss chunked", full=True),
    TrainingRow("bloom-560m-sdpa", "--loss chunked --attention sdpa", full=True),
    TrainingRow("bloom-560m-bf16", "--bf16", full=True),
    TrainingRow("bloom-560m-chunked-bf16", "--bf16 --loss chunked", full=True),
    TrainingRow("bloom-560m-all", f"{ALL} --per_device_train_batch_size 16", full=True),
    TrainingRow(
        "bloom-560m-all-64",
        f"{ALL} --per_device_train_batch_size 64 --num_train_epochs 4",
        full=True,
        equal_to="bloom-560m-all-64",
    ),
    # each batch has a different length: this row is slow if the attention kernel is planned again for each length
    TrainingRow("bloom-560m-sdpa-lengths", "--loss chunked --attention sdpa --padding longest", full=True),
    TrainingRow("bloom-560m-checkpointed", "--loss chunked --activation_checkpointing", full=True),
    TrainingRow("bloom-560m-compiled", "--loss chunked --torch_compile", full=True),
    TrainingRow("bloom-560m-lora", "--loss chunked --lora_rank 8", full=True, equal_to="bloom-560m-lora"),
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
LOSS_TOLERANCE = 0.02  # relative difference of the loss between two methods in 16-bit precision
LOSS_TOLERANCE_OF_RANKS = 1e-4  # in fp32, with --ranks
HELD_TOLERANCE = 0.01  # relative difference between the bytes that a rank holds and the estimate

STRATEGIES = {path.stem: f"--deepspeed ds_configs/{path.name}" for path in sorted(REPOSITORY.glob("ds_configs/*.json"))}
STRATEGIES |= {
    path.stem: f"--fsdp --fsdp_config fsdp_configs/{path.name}"
    for path in sorted(REPOSITORY.glob("fsdp_configs/*.json"))
    if path.stem != "hybrid_shard"  # it shards inside a node, so on one node it is full_shard
}
RESUME = "--resume_from_checkpoint"
ON_GPUS = ("full_shard_cpu_offload", "fsdp1_full_shard")  # the configs that a CPU cannot run


def rank_rows(ranks: int) -> list[TrainingRow]:
    """Return the rows of --ranks, in fp32 with a global batch of 8 questions. They are compared with one rank."""

    def row(name: str, flags: str = "", like: str = "", on: int = ranks, batch: int = 0, **more: Any) -> TrainingRow:
        flags += f" --fp16 False --gradient_accumulation_steps 1 --per_device_train_batch_size {batch or 8 // on}"
        program = f"scripts/launch.py --nproc-per-node={on} scripts/train.py" if on > 1 else "scripts/train.py"
        return TrainingRow(name, f"{flags} --save_total_limit 2", program, equal_to="one_rank" + like, ranks=on, **more)

    gpt = "--model_name custom-gpt --vocab_size 1024 --hidden_size 64 --num_heads 4 --ff_dim 128 --save_strategy no"
    none = "--loss chunked --attention sdpa --padding none"
    groups = STRATEGIES["full_shard"] if ranks > 2 else ""  # FSDP shards over the groups of tensor parallelism
    long = "--num_train_epochs 4 --save_strategy no"  # 32 steps, so that a signal arrives before the end
    return [
        row("one_rank", on=1),
        row("one_rank_lora", LORA, "_lora", on=1),
        row("one_rank_gpt", gpt, "_gpt", on=1),
        row("one_rank_long", long, "_long", on=1),
        row("one_rank_padding_none", none, on=1),
        row("ddp"),
        *(
            row(name, flags, gpu_only=name in ON_GPUS)
            for name, flags in STRATEGIES.items()
            if ranks == 4 or name != "hybrid_shard_2x2"
        ),
        *(row(f"padding_none_{name}", f"{STRATEGIES[name]} {none}") for name in ("zero3", "full_shard")),
        row("lora_ddp", LORA, "_lora"),
        *(row(f"lora_{name}", f"{STRATEGIES[name]} {LORA}", "_lora") for name in ("zero3", "full_shard")),
        # The two ranks of a tensor-parallel group get the same questions
        row("tensor_parallel", f"--tensor_parallel 2 {gpt} {groups}", "_gpt", batch=16 // ranks),
        row("full_shard_on_2_ranks", f"{STRATEGIES['full_shard']} {RESUME} output/full_shard/checkpoint-8", on=2),
        row("stop", f"{STRATEGIES['zero2']} {long}", "_long", disturbed="stop"),
        row("hang", f"{STRATEGIES['zero3']} {long} --ddp_timeout 20", disturbed="hang"),
    ]


# 2. Running a row


def training_command(row: TrainingRow) -> list[str]:
    """Return the command of a row, with absolute paths because it runs in the folder of the results."""
    words = f"{row.program} {row.flags}".split()
    return [sys.executable, *(str(REPOSITORY / word) if word.endswith((".py", ".json")) else word for word in words)]


def training_environment(folder: Path, cpu: bool, ranks: int | None = None) -> dict[str, str]:
    """Return the caller's environment without the caller's knobs and Slurm job.

    It has no GPU with `cpu`, otherwise one, and with `ranks` all GPUs, which the ranks may share.
    """
    variables = drop_settings(os.environ, folder)
    if cpu:
        return variables | {"CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": "0", "FP16": "False"}
    if ranks:
        return variables | {"RANKS_PER_GPU": str(ranks)}
    return variables | {"CUDA_VISIBLE_DEVICES": os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0]}


def run_row(row: TrainingRow, environment: dict[str, str], folder: Path, timeout: int) -> dict:
    """Train, check that the saved tiny model loads again, and return the row's results."""
    variables = environment | (FULL if row.full else TINY)
    place = (variables, folder, timeout)
    command = training_command(row)
    if row.disturbed:
        record = run_training(row.name, command, *place, partial(disturb, row.disturbed, timeout))
        if row.disturbed == "hang":
            found = re.search(r"no answer from rank \d+", (folder / f"{row.name}.log").read_text())
            return {"status": "completed" if found else "failed", "reason": found[0] if found else record["reason"]}
        if record.get("exit_code") != STOPPED:
            return {"status": "failed", "reason": f"exit code {record.get('exit_code')} after a stop"}
        command.append(RESUME)
    record = run_training(row.name, command, *place)
    if record["status"] != "completed":
        return {"status": record["status"], "reason": record["reason"]}
    result = figures(record)
    if row.ranks:
        return result | compare_held_bytes(record)
    if not row.full:
        # With LoRA, the losses of an untrained model would be within LOSS_TOLERANCE
        first, last = record["eval"][0]["loss"], result["eval_loss"]
        if not last < first:
            return result | {"status": "failed", "reason": f"Eval loss is {last:.3f}, and {first:.3f} after one epoch"}
        saved = {"MODEL_NAME": str(folder / record["output_dir"])}
        job_id = f"{row.name}_reloaded"
        command = training_command(TrainingRow("reloaded"))
        again = run_training(job_id, command, variables | RELOADED | saved, folder, timeout)
        if again["status"] != "completed":
            return result | {"status": "failed", "reason": again["reason"]}
        result["reloaded_loss"] = figures(again)["eval_loss"]
    return result


def disturb(how: str, timeout: int, launcher: psutil.Popen, log: Path) -> None:
    """Wait for step 8 of a training run with several ranks. Then ask the run to stop, or freeze its last rank."""
    ends = time.monotonic() + timeout
    while launcher.poll() is None and "\nstep 8 of " not in log.read_text() and time.monotonic() < ends:
        time.sleep(0.05)
    with contextlib.suppress(psutil.NoSuchProcess):  # the training has ended
        if how == "stop":
            launcher.send_signal(signal.SIGUSR1)
        elif ranks := launcher.children():
            ranks[-1].send_signal(signal.SIGSTOP)


# 3. Results


def figures(record: dict) -> dict:
    """Return the numbers of a run record that the table shows. A number that the run did not measure is None."""
    training = record["train"]
    energy = record.get("energy") or {}
    activity = (record.get("gpu_activity") or [{}])[0]
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
        "watts": energy.get("mean_watts"),
        "joules_per_question": energy.get("joules_per_question"),
        "sm_percent": activity.get("sm_percent"),
        "tensor_percent": activity.get("tensor_percent"),
        "dram_percent": activity.get("dram_percent"),
        "peak_gpu_gib": gib(record["peak_gpu_memory"]),
        "pinned_gib": gib(record["peak_pinned_memory"]),
    }


def gib(ranks: list[dict] | None) -> float | None:
    return ranks[0]["allocated_mib"] / 1024 if ranks else None


def compare_held_bytes(record: dict) -> dict:
    """Compare the bytes of model state on the rank that holds most with the estimate. Return both in MiB.

    The result is a failure if a part differs.
    """
    try:
        parts = predicted_parts(record, python=MemoryPart("Python", 0))
    except WorkshopError:  # a model or a strategy that cannot be estimated
        return {}
    wrong = []
    found = {"held_mib": 0.0, "estimated_mib": 0.0}
    for kind in ("parameters", "gradients", "optimizer_state"):
        held = [rank[kind] for rank in record["held"]]
        if None in held:  # without accumulation, DeepSpeed frees its gradients within the step
            continue
        estimated = sum(part.gpu + part.cpu for part in parts if part.name == kind.replace("_", " "))
        found["held_mib"] += max(held) / MIB
        found["estimated_mib"] += estimated / MIB
        if abs(max(held) - estimated) > HELD_TOLERANCE * estimated:
            wrong.append(f"{kind}: {max(held):,} bytes held, {estimated:,.0f} estimated")
    return found | ({"status": "failed", "reason": "; ".join(wrong)} if wrong else {})


def compare_with_reference(row: TrainingRow, result: dict, rows: dict[str, dict]) -> dict:
    """Return a failure if the losses of a completed row differ from those of its reference, otherwise {}."""
    wanted = rows.get(row.reference, {}).get("eval_loss")
    if wanted is None and row.ranks and row.name != row.reference and "eval_loss" in result:
        reason = f"there is no row {row.reference} to compare it with; add it to --rows"
        return {"status": "failed", "reason": reason}
    wanted = wanted or result.get("eval_loss", 0)
    tolerance = LOSS_TOLERANCE_OF_RANKS if row.ranks else LOSS_TOLERANCE
    for name in ("eval_loss", "reloaded_loss"):
        loss = result.get(name)
        if loss is not None and not abs(loss - wanted) <= tolerance * wanted:
            reason = f"{COLUMNS[name][0]} is {loss:.6f}, but Eval loss of {row.reference} is {wanted:.6f}"
            return {"status": "failed", "reason": reason}
    return {}


COLUMNS = {  # key of a row's result -> header, digits
    "train_loss": ("Train loss", 3),
    "eval_loss": ("Eval loss", 6),
    "reloaded_loss": ("Reloaded", 3),
    "f1": ("F1", 1),
    "samples_per_second": ("Samples/s", 2),
    "tokens_per_second": ("Real tokens/s", 0),
    "mfu_percent": ("MFU (%)", 1),
    "matmul_peak_tflops": ("MFU peak (TFLOP/s)", 3),
    "watts": ("Power (W)", 0),
    "joules_per_question": ("J per question", 2),
    "sm_percent": ("SM activity (%)", 0),
    "tensor_percent": ("Tensor activity (%)", 0),
    "dram_percent": ("DRAM activity (%)", 0),
    "peak_gpu_gib": ("Peak GPU (GiB)", 2),
    "estimated_gib": ("Estimate (GiB)", 2),
    "held_mib": ("Held (MiB)", 3),
    "estimated_mib": ("Estimate (MiB)", 3),
    "pinned_gib": ("Pinned (GiB)", 2),
    "seconds": ("Time (s)", 0),
}


def results_markdown(content: dict) -> str:
    rows = content["rows"]
    shown = [key for key in COLUMNS if any(result.get(key) is not None for result in rows.values())]
    body = []
    for name, result in rows.items():
        figures = [result.get(key) for key in shown]
        cells = ["" if f is None else f"{f:,.{COLUMNS[key][1]}f}" for key, f in zip(shown, figures, strict=True)]
        body.append([name, result["status"], result.get("precision", ""), *cells])
    header = ["Run", "Status", "Precision", *(COLUMNS[key][0] for key in shown)]
    reasons = [f"- {name}: {result['reason']}" for name, result in rows.items() if "reason" in result]
    sizes = (
        "- bloom-560m: random weights, micro batch 4, accumulation 4, padded to 512 tokens; "
        "the rows `all` as in efficiency/all; other rows: tiny-bloom"
    )
    return "\n".join([f"[{machine_in_words(content['machine'])}]\n", grid(header, body), "", *reasons, sizes, ""])


# 4. The machine, and the command line


def machine(environment: dict[str, str], cpu: bool) -> dict:
    """Return the hardware and the PyTorch version. Raises WorkshopError (exit code 3) if PyTorch sees no GPU.

    Another process looks at the GPU: a CUDA context in this process would take GPU memory from all rows.
    """
    code = "import json; from records.writer import hardware; print(json.dumps(hardware(1)))"
    finished = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY / "scripts",
        env=environment,
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    here = json.loads(finished.stdout) | {"torch": torch.__version__}
    if not cpu and not here["gpu"]:
        remedy = "use a GPU node (sbatch gpu_check.slurm), or check only the CPU rows: make gpu-check FLAGS=--cpu"
        raise WorkshopError("GPU", f"PyTorch sees none on {socket.gethostname()}", remedy, ENVIRONMENT)
    return here


def read_results(path: Path, here: dict) -> dict:
    """Return the results of earlier calls. Raises WorkshopError (exit code 2) if they are from another machine."""
    if not path.exists():
        return {"machine": here, "rows": {}}
    content = read_json(path, "move it away")
    if content["machine"] != here:
        what = f"has results of another machine or version: {machine_in_words(content['machine'])}"
        raise WorkshopError(path, what, "move the file away, or give another --output")
    return content


def machine_in_words(here: dict) -> str:
    return ", ".join(f"{name} {value}" for name, value in here.items() if value)


def main() -> None:
    # raise an exception on SIGTERM, so that run_training kills the training that is running
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    parser = OneLineErrors(description=__doc__)
    names = ", ".join(row.name for row in ROWS)
    parser.add_argument("--rows", nargs="+", metavar="ROW", default=[], help=f"one or more of: {names}")
    parser.add_argument("--ranks", type=int, choices=(2, 4, 8), help="check every strategy with this number of ranks")
    parser.add_argument("--cpu", action="store_true", help="run without a GPU only the rows that are fast on a CPU")
    parser.add_argument("--output", type=Path, help="results folder (results/gpu_check)")
    parser.add_argument(
        "--timeout", type=COUNT.whole_number, default=600, help="time limit per training, in seconds (%(default)s)"
    )
    arguments = parser.parse_args()
    table = rank_rows(arguments.ranks) if arguments.ranks else ROWS
    if unknown := set(arguments.rows) - {row.name for row in table}:
        parser.error(f"argument --rows: {unknown.pop()} is unknown; choose from {', '.join(row.name for row in table)}")
    if arguments.rows:
        wanted = [row for row in table if row.name in arguments.rows]
    else:
        wanted = [row for row in table if not (arguments.cpu and (row.full or row.gpu_only))]
    default = f"gpu_check_{arguments.ranks}_ranks" if arguments.ranks else "gpu_check"
    folder = (arguments.output or Path("results", default)).absolute()
    path = folder / "gpu_check.json"
    environment = training_environment(folder, arguments.cpu, arguments.ranks)
    content = read_results(path, machine(environment, arguments.cpu))
    rows = content["rows"]
    folder.mkdir(parents=True, exist_ok=True)
    for row in wanted:
        if rows.get(row.name, {}).get("status") == "completed":
            continue
        start = time.monotonic()
        result = run_row(row, environment, folder, arguments.timeout)
        if result["status"] == "completed":
            result |= compare_with_reference(row, result, rows)
        result["seconds"] = time.monotonic() - start
        if row.full:
            settings = parse_memory_plan(training_command(row)[2:], environment=FULL)
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
