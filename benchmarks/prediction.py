"""Predicted beside measured: the memory of short trainings on the CPU.

    python benchmarks/prediction.py                               # all rows; a quarter of an hour
    python benchmarks/prediction.py --rows DDP ZeRO-2             # some of them
    python benchmarks/prediction.py --save                        # and write prediction.json, for the pages

Each row is a training of a few steps by scripts/train.py with one thread per rank, of a BLOOM of 9.5 million parameters
in fp32 if the row says nothing else. The prediction is that of estimate/predict_from_record.py, as in the report.
Measured are the largest resident memory of the processes, added up.

The results of the last --save, with commit and machine, are in benchmarks/prediction.json and docs/memory.md.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path

from harness import REPOSITORY, SAMPLE, SCRIPTS, commit, cpu, make_model_folder, run_training, versions

sys.path.insert(0, str(SCRIPTS))
from estimate.predict_from_record import predicted_memory

RESULTS = Path(__file__).with_suffix(".json")
# That of communication.py, and one whose logits are larger than all else, as BLOOM's are
BLOOM = {"model_type": "bloom", "vocab_size": 12288, "hidden_size": 256, "n_layer": 8, "n_head": 4}
WHOLE_VOCABULARY = BLOOM | {"vocab_size": 250880, "hidden_size": 128, "n_layer": 2}
TOKENS = 4096  # of the tokenizer
STEPS = 8

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
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    results = {"commit": commit(), "cpu": cpu(), "cores": len(os.sched_getaffinity(0))}
    results["versions"] = versions()
    rows = []
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        for name, config in (("model", BLOOM), ("whole_vocabulary", WHOLE_VOCABULARY)):
            make_model_folder(folder / name, config, TOKENS)
        for row in arguments.rows:
            rows.append({"row": row, "ranks": ROWS[row].ranks, "memory_mib": train(folder, ROWS[row])})
            print(page_row(rows[-1]), flush=True)
    results["rows"] = rows
    print(page_table(results))
    print(summary(results))
    if arguments.save:
        RESULTS.write_text(json.dumps(results, indent=1) + "\n")


def read_results() -> dict:
    """Of the last --save."""
    return json.loads(RESULTS.read_text())


def train(folder: Path, row: Row) -> list[float]:
    """MiB of all ranks, predicted and measured."""
    words = [str(SCRIPTS / "train.py"), "--dataset", str(SAMPLE), "--train_size", "64", "--eval_size", "2"]
    words += ["--no_em_f1", "--fp16", "False", "--bf16", "False", "--max_length", "128", "--max_steps", str(STEPS)]
    words += ["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--eval_strategy", "no"]
    words += ["--save_strategy", "no", "--use_cpu"]
    words += [str(folder / word) if (folder / word).is_dir() else word for word in row.model]
    words += [str(REPOSITORY / word) if word.endswith(".json") else word for word in row.flags]
    ranks = row.ranks if row.ranks > 1 else 0
    _, record = run_training(folder, words, ranks, XDG_CACHE_HOME=str(folder / "cache"))
    predicted = predicted_memory(record)
    return [round(predicted.node_mib, 1), round(sum(record["peak_process_mib"]), 1)]


def page_row(row: dict) -> str:
    predicted, measured = row["memory_mib"]
    cells = [row["row"], str(row["ranks"]), f"{predicted:.0f}", f"{measured:.0f}", f"{100 * difference(row):+.0f} %"]
    return "| " + " | ".join(cells) + " |"


def difference(row: dict) -> float:
    """Measured minus predicted, as a share of what was predicted, as in the report."""
    predicted, measured = row["memory_mib"]
    return measured / predicted - 1


def page_table(results: dict) -> str:
    """As docs/results.md shows it."""
    heads = ["Run", "Ranks", "MiB, predicted", "MiB, measured", "Difference"]
    lines = ["| " + " | ".join(heads) + " |", "|" + " --- |" * len(heads)]
    return "\n".join([*lines, *map(page_row, results["rows"])])


def summary(results: dict) -> str:
    """The median of the differences without their signs, and the largest, as docs/memory.md says them."""
    differences = {row["row"]: difference(row) for row in results["rows"]}
    worst = max(differences, key=lambda row: abs(differences[row]))
    middle = statistics.median(map(abs, differences.values()))
    return (
        f"memory: the median difference, without its sign, is {100 * middle:.0f} %, the largest is "
        f"{100 * differences[worst]:+.0f} % ({worst})"
    )


if __name__ == "__main__":
    main()
