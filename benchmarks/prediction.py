"""Predicted beside measured: memory and samples per second of short trainings on the CPU.

    python benchmarks/prediction.py                               # all rows; a quarter of an hour
    python benchmarks/prediction.py --rows DDP ZeRO-2             # some of them
    python benchmarks/prediction.py --save                        # and write prediction.json, for the pages

Each row is a training of a few steps by scripts/train.py with one thread per rank, of a BLOOM of 9.5 million parameters
in fp32 if the row says nothing else. Predicted is what estimate_memory.py and estimate_time.py say of these flags, from
matrix products, copies and all-reduces that are timed with all ranks at once, and sequences as long as they were.
Measured are the largest resident memory of the processes, added up, and the steady rate behind the warm-up.

Where other programs work on the same cores, a training loses more than a product that was timed at its best. `busy` is
the share of the cores' time that others took meanwhile. Above a twentieth the row is run again, --repeats times at
most, and the run with the least counts.

The results of the last --save, with commit and machine, are in benchmarks/prediction.json and docs/memory.md.
"""

import argparse
import importlib.metadata
import json
import multiprocessing
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import SimpleNamespace

import psutil
import torch

REPOSITORY = Path(__file__).resolve().parent.parent
SCRIPTS = REPOSITORY / "scripts"
sys.path.insert(0, str(SCRIPTS))

from estimate.planned import options_of_plan  # noqa: E402
from estimate_memory import estimate, totals, without_gpu  # noqa: E402
from estimate_time import GB, Batch, Rates, Step, measure_copy, predict_step  # noqa: E402
from model import train_tokenizer  # noqa: E402

DATASET = REPOSITORY / "data" / "squad_sample.json"
RESULTS = Path(__file__).with_suffix(".json")
# That of communication.py, and one whose logits are larger than all else, as BLOOM's are
BLOOM = {"model_type": "bloom", "vocab_size": 12288, "hidden_size": 256, "n_layer": 8, "n_head": 4}
WHOLE_VOCABULARY = BLOOM | {"vocab_size": 250880, "hidden_size": 128, "n_layer": 2}
TOKENS = 4096  # of the tokenizer
DISTURBED = 0.05  # share of the cores' time
STEPS = 8
MIB = 2**20

MODEL = ["--model_name", "model", "--from_scratch"]
LARGE_HEAD = ["--model_name", "whole_vocabulary", "--from_scratch", "--gradient_accumulation_steps", "1"]
GPT = ["--model_name", "custom-gpt", "--vocab_size", "8192", "--hidden_size", "256", "--num_layers", "6"]
GPT += ["--num_heads", "4", "--ff_dim", "1024"]
CHUNKED = ["--loss", "chunked"]
FSDP = ["--fsdp", "--fsdp_config"]


@dataclass
class Row:
    ranks: int = 1
    flags: list[str] = field(default_factory=list)
    model: list[str] = field(default_factory=lambda: MODEL)


ROWS = {
    "plain": Row(),
    "plain, batch 8": Row(1, ["--per_device_train_batch_size", "8"]),
    "plain, 256 tokens": Row(1, ["--max_length", "256"]),
    "plain, padded to the longest": Row(1, ["--max_length", "256", "--padding", "longest"]),
    "plain, bf16": Row(1, ["--bf16", "True"]),
    "plain, chunked loss": Row(1, CHUNKED),
    "plain, activation checkpointing": Row(1, ["--activation_checkpointing"]),
    "custom GPT": Row(1, [], GPT),
    "whole vocabulary": Row(1, [], LARGE_HEAD),
    "whole vocabulary, chunked loss": Row(1, CHUNKED, LARGE_HEAD),
    "ZeRO-2, 1 rank": Row(1, ["--deepspeed", "ds_configs/zero2.json"]),
    "DDP": Row(2),
    "DDP, chunked loss": Row(2, CHUNKED),
    "ZeRO-0": Row(2, ["--deepspeed", "ds_configs/zero0.json"]),
    "ZeRO-1": Row(2, ["--deepspeed", "ds_configs/zero1.json"]),
    "ZeRO-2": Row(2, ["--deepspeed", "ds_configs/zero2.json"]),
    "ZeRO-3": Row(2, ["--deepspeed", "ds_configs/zero3.json"]),
    "FULL_SHARD": Row(2, [*FSDP, "fsdp_configs/full_shard.json"]),
    "SHARD_GRAD_OP": Row(2, [*FSDP, "fsdp_configs/shard_grad_op.json"]),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=4, help="of a run that others disturb")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    results = {"commit": commit(), "cpu": cpu(), "cores": len(os.sched_getaffinity(0))}
    results["versions"] = versions()
    rows = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folders(folder)
        for row in arguments.rows:
            run = least_disturbed(folder, ROWS[row], arguments.repeats)
            rows.append({"row": row, "ranks": ROWS[row].ranks} | run)
            print(page_row(rows[-1]), f"others took {run['busy']:.0%} of the cores", flush=True)
    results["rows"] = rows
    print(page_table(results))
    print(summary(results))
    if arguments.save:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def read_results() -> dict:
    """Of the last --save."""
    return json.loads(RESULTS.read_text())


def make_model_folders(folder: Path) -> None:
    tokenizer = train_tokenizer(SimpleNamespace(dataset=str(DATASET), eval_dataset=None), TOKENS)
    for name, config in (("model", BLOOM), ("whole_vocabulary", WHOLE_VOCABULARY)):
        tokenizer.save_pretrained(folder / name)
        (folder / name / "config.json").write_text(json.dumps(config))


def least_disturbed(folder: Path, row: Row, repeats: int) -> dict:
    runs: list[dict] = []
    while len(runs) < repeats and (not runs or runs[-1]["busy"] > DISTURBED):
        runs.append(train(folder, row))
    return min(runs, key=lambda run: run["busy"])


def train(folder: Path, row: Row) -> dict:
    """Memory in MiB of all ranks, samples per second of all ranks, and the predicted step."""
    (folder / "cache" / "distributed-llm-workshop" / "rates.json").unlink(missing_ok=True)  # what is here, and now
    job_id = f"{time.time_ns()}"
    environment = os.environ | {"OMP_NUM_THREADS": "1", "XDG_CACHE_HOME": str(folder / "cache"), "JOB_ID": job_id}
    words = ["--dataset", str(DATASET), "--train_size", "64", "--eval_size", "2", "--no_em_f1", "--fp16", "False"]
    words += ["--bf16", "False", "--max_length", "128", "--max_steps", str(STEPS), "--gradient_accumulation_steps", "2"]
    words += ["--per_device_train_batch_size", "4", "--eval_strategy", "no", "--save_strategy", "no", "--use_cpu"]
    words += [str(folder / word) if (folder / word).is_dir() else word for word in row.model]
    words += [str(REPOSITORY / word) if word.endswith(".json") else word for word in row.flags]
    launch = [str(SCRIPTS / "launch.py"), f"--nproc-per-node={row.ranks}"] if row.ranks > 1 else []
    command = [sys.executable, *launch, str(SCRIPTS / "train.py"), *words]
    start = time.perf_counter(), cpu_seconds_of_all(), cpu_seconds_of_children()
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    end = time.perf_counter(), cpu_seconds_of_all(), cpu_seconds_of_children()
    seconds, of_all, of_children = (after - before for before, after in zip(start, end, strict=True))
    if done.returncode:
        sys.exit(f"error: {words} ended with {done.returncode}:\n{done.stdout[-1000:]}\n{done.stderr[-3000:]}")
    record = json.loads((folder / "results" / f"{job_id}.json").read_text())
    memory, step = predict(folder, [*words, "--gpus", str(row.ranks)], launch, record)
    return {
        "memory_mib": [memory, round(sum(record["peak_process_mib"]), 1)],
        "samples_per_second": [step.samples_per_second, record["train"]["steady_samples_per_second"]],
        "step": asdict(step) | {"seconds": step.seconds},
        "busy": round(max(0.0, of_all - of_children) / seconds / psutil.cpu_count(), 2),
    }


def predict(folder: Path, words: list[str], launch: list[str], record: dict) -> tuple[float, Step]:
    """MiB of all ranks, and a step of all ranks, of this command line of train.py."""
    options = options_of_plan(words, "", gpu=False)
    ranks = options.values["gpus"]
    train = record["train"]
    samples = train["steps"] * options.values["gradient_accumulation_steps"] * ranks
    samples *= options.values["per_device_train_batch_size"]
    length = round((train["real_tokens"] + train["padding_tokens"]) / samples)
    size = options.values["per_device_train_batch_size"]
    batch = Batch(size, length, counted=max(1, round(size * train["counted_tokens"] / samples)))
    rates = Rates(train["matmul_peak_tflops"] * 1e12, copies_at_once(ranks), bus_between(folder, launch))
    memory = totals(without_gpu(estimate(options)), ranks)[1] / MIB
    return round(memory, 1), predict_step(options, rates, batch)


def copies_at_once(ranks: int) -> float:
    """Bytes per second of each of so many processes while all of them copy."""
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(ranks, mp_context=spawn, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        return statistics.fmean(pool.map(measure_copy, [torch.device("cpu")] * ranks))


def bus_between(folder: Path, launch: list[str]) -> float | None:
    """Bytes per second between the ranks; None of one rank, which has nobody to talk to."""
    if not launch:
        return None
    file = folder / "bandwidth.json"
    test = [str(SCRIPTS / "measure_bandwidth.py"), "--min_bandwidth", "0", "--output", str(file)]
    subprocess.run([sys.executable, *launch, *test], cwd=folder, capture_output=True, check=True)
    return json.loads(file.read_text())["bus_bandwidth_gb_per_s"] * GB


def cpu_seconds_of_all() -> float:
    times = psutil.cpu_times()
    return times.user + times.nice + times.system


def cpu_seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def page_row(row: dict) -> str:
    memory = [f"{value:.0f}" for value in row["memory_mib"]] + [off(row["memory_mib"])]
    rate = [f"{value:.2f}" for value in row["samples_per_second"]] + [off(row["samples_per_second"])]
    return "| " + " | ".join([row["row"], str(row["ranks"]), *memory, *rate]) + " |"


def off(values: list[float]) -> str:
    """Measured minus predicted, in percent of what was predicted, as in the report."""
    return f"{100 * error(values):+.0f} %"


def error(values: list[float]) -> float:
    predicted, measured = values
    return measured / predicted - 1


def page_table(results: dict) -> str:
    """As docs/memory.md shows it."""
    heads = [
        "Run",
        "Ranks",
        "MiB, predicted",
        "MiB, measured",
        "Difference",
        "Samples/s, predicted",
        "Samples/s, measured",
    ]
    lines = ["| " + " | ".join([*heads, "Difference"]) + " |", "|" + " --- |" * 8]
    return "\n".join([*lines, *map(page_row, results["rows"])])


def summary(results: dict) -> str:
    """The median of the errors without their signs, and the largest, as docs/memory.md says them."""
    lines = []
    for what, name in (("memory", "memory_mib"), ("samples/s", "samples_per_second")):
        errors = {row["row"]: error(row[name]) for row in results["rows"]}
        worst = max(errors, key=lambda row: abs(errors[row]))
        middle = statistics.median(map(abs, errors.values()))
        lines.append(
            f"{what}: the median difference, without its sign, is {100 * middle:.0f} %, the largest is "
            f"{100 * errors[worst]:+.0f} % ({worst})"
        )
    return "\n".join(lines)


def versions() -> dict:
    return {name: importlib.metadata.version(name) for name in ("torch", "transformers", "accelerate", "deepspeed")}


def commit() -> str:
    words = ["git", "-C", str(REPOSITORY), "describe", "--always", "--dirty"]
    return subprocess.run(words, capture_output=True, text=True, check=True).stdout.strip()


def cpu() -> str:
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if "model name" in line]
    return names[0].split(":")[1].strip() if names else "unknown CPU"


if __name__ == "__main__":
    main()
