"""Compare the predicted with the measured memory of an optimizer step, in short training runs on the CPU.

    python benchmarks/prediction.py                               # all rows (a quarter of an hour)
    python benchmarks/prediction.py --rows bf16 ZeRO-2            # only rows with both words in their names
    python benchmarks/prediction.py --save                        # also replace these rows in prediction.json

Each row is a run of scripts/train.py for a few steps, with one thread per rank. The prediction uses the run record,
as in the report. It leaves out the memory of Python and its libraries, which the estimate does not model.

After each operation of the measured step, a dispatch mode asks the C library how many bytes are in use (mallinfo2).
PyTorch's profiler counts the same bytes in one process, but it misses the memory that gloo's threads free. Bytes that
do not belong to a tensor when the step begins (Python, libraries) are subtracted.

The saved results, with commit and machine, are in benchmarks/prediction.json and docs/results.md.
"""

import argparse
import ctypes
import gc
import json
import os
import statistics
import sys
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import TrainerCallback

from harness import (
    REPOSITORY,
    RESULT,
    SAMPLE,
    SCRIPTS,
    commit,
    cpu,
    make_model_folder,
    read_result,
    run_training,
    save_rows,
    versions,
)

sys.path.insert(0, str(SCRIPTS))
from distributed.collectives import gather_lists, print_once
from estimate.memory import MemoryPart, totals
from estimate.predict_from_record import predicted_parts
from measure.measured_memory import storages

RESULTS = Path(__file__).with_suffix(".json")
MIB = 2**20
TOKENS = 4096  # vocabulary of the tokenizer
STEPS = 3  # The last step is measured. The first one allocates buffers and, at its end, the state of Adam.
BLOOM = {"model_type": "bloom", "vocab_size": 12288, "hidden_size": 256, "n_layer": 8, "n_head": 4}
SIZES = {"hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 4, "vocab_size": 12288}
MODELS = {
    "bloom": BLOOM,
    "bloom_with_large_head": BLOOM | {"vocab_size": 250880, "hidden_size": 128, "n_layer": 2},
    "llama": {"model_type": "llama", "num_key_value_heads": 2, "intermediate_size": 704} | SIZES,
    "gpt2": {"model_type": "gpt2", "vocab_size": 12288, "n_embd": 256, "n_layer": 8, "n_head": 4},
}
GPT = ["custom-gpt", "--vocab_size", "12288", "--hidden_size", "256", "--num_layers", "8"]
GPT += ["--num_heads", "4", "--ff_dim", "1024"]
FP32 = ["--bf16", "False"]
BF16 = ["--bf16", "True"]
CHUNKED = ["--loss", "chunked"]
LORA = ["--lora_rank", "8"]
CHECKPOINTED = ["--activation_checkpointing"]
LONG = "long_questions.jsonl"
WITHOUT_PADDING = ["--padding", "none", "--attention", "sdpa", "--dataset", LONG]
ONE_MICRO_BATCH = ["--gradient_accumulation_steps", "1"]
STRATEGIES = {
    "DDP": [],
    **{f"ZeRO-{stage}": ["--deepspeed", f"ds_configs/zero{stage}.json"] for stage in (0, 1, 2, 3)},
    "FULL_SHARD": ["--fsdp", "--fsdp_config", "fsdp_configs/full_shard.json"],
    "SHARD_GRAD_OP": ["--fsdp", "--fsdp_config", "fsdp_configs/shard_grad_op.json"],
}


@dataclass
class Row:
    flags: list[str] = field(default_factory=list)
    ranks: int = 1
    model: str = "bloom"


def rows() -> dict[str, Row]:
    """Return all training runs by name. A row without a strategy in its name trains in a single process."""
    found = {}
    for name, precision in (("fp32", FP32), ("bf16", BF16)):
        for model in ("bloom", "llama", "gpt2", "custom-gpt"):
            found[f"{model}, {name}"] = Row(precision, 1, model)
        found[f"bloom, {name}, chunked loss"] = Row([*precision, *CHUNKED])
        found[f"bloom, {name}, checkpointing"] = Row([*precision, *CHECKPOINTED])
        found[f"bloom, {name}, chunked loss, checkpointing"] = Row([*precision, *CHUNKED, *CHECKPOINTED])
        found[f"bloom, {name}, large head"] = Row(precision, 1, "bloom_with_large_head")
        found[f"bloom, {name}, large head, chunked loss"] = Row([*precision, *CHUNKED], 1, "bloom_with_large_head")
        for strategy, flags in STRATEGIES.items():
            found[f"bloom, {name}, {strategy}"] = Row([*precision, *flags], 2)
    for length in ("128", "512"):
        found[f"bloom, bf16, {length} tokens"] = Row([*BF16, "--max_length", length])
        found[f"bloom, bf16, {length} tokens, SDPA"] = Row([*BF16, "--max_length", length, "--attention", "sdpa"])
    found["bloom, bf16, 1 micro batch"] = Row([*BF16, *ONE_MICRO_BATCH])
    for strategy in ("DDP", "ZeRO-2", "ZeRO-3", "FULL_SHARD"):
        found[f"bloom, bf16, {strategy}, 1 micro batch"] = Row([*BF16, *STRATEGIES[strategy], *ONE_MICRO_BATCH], 2)
    for strategy in ("ZeRO-3", "FULL_SHARD"):
        flags = [*BF16, *STRATEGIES[strategy]]
        found[f"bloom, bf16, {strategy}, chunked loss"] = Row([*flags, *CHUNKED], 2)
        found[f"llama, bf16, {strategy}"] = Row(flags, 2, "llama")
        found[f"custom-gpt, bf16, {strategy}"] = Row(flags, 2, "custom-gpt")
    checkpointed = ["--fsdp", "--fsdp_config", "fsdp_configs/full_shard_activation_checkpointing.json"]
    found["bloom, bf16, FULL_SHARD, checkpointing"] = Row([*BF16, *checkpointed], 2)
    found["bloom, bf16, LoRA"] = Row([*BF16, *LORA])
    found["llama, bf16, LoRA, chunked loss"] = Row([*BF16, *LORA, *CHUNKED], 1, "llama")
    for strategy in ("DDP", "ZeRO-1", "ZeRO-3", "FULL_SHARD"):
        found[f"bloom, bf16, LoRA, {strategy}"] = Row([*BF16, *LORA, *STRATEGIES[strategy]], 2)
    for strategy in ("ZeRO-3", "FULL_SHARD"):
        flags = [*BF16, *LORA, *CHECKPOINTED, *STRATEGIES[strategy]]
        found[f"bloom, bf16, LoRA, checkpointing, {strategy}"] = Row(flags, 2)
    for name, precision in (("fp32", FP32), ("bf16", BF16)):
        for model in ("custom-gpt", "llama"):  # the head of custom-gpt is tied to the embedding
            found[f"{model}, {name}, tensor parallel"] = Row([*precision, "--tensor_parallel", "2"], 2, model)
    for model in ("bloom", "llama"):
        found[f"{model}, bf16, without padding"] = Row([*BF16, *WITHOUT_PADDING], 1, model)
    found["bloom, bf16, ZeRO-3, checkpointing"] = Row([*BF16, *STRATEGIES["ZeRO-3"], *CHECKPOINTED], 2)
    return found


ROWS = rows()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", metavar="WORDS", help="only rows with these words in their names")
    parser.add_argument("--save", action="store_true", help=f"replace these rows in {RESULTS.name}")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child)
        return
    machine = {"commit": commit(), "cpu": cpu(), "cores": len(os.sched_getaffinity(0))}
    chosen = [name for name in ROWS if all(word in name for word in arguments.rows or [])]
    if not chosen:
        parser.error(f"--rows: no row has all of these words; choose from {', '.join(ROWS)}")
    results: dict = {"versions": versions(), "rows": []}
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        make_models(folder, *MODELS)
        for name in chosen:
            mib = train(folder, ROWS[name])
            results["rows"].append({"row": name, "ranks": ROWS[name].ranks, "mib": mib} | machine)
            print(page_row(results["rows"][-1]), flush=True)
    print(summary(results))
    if arguments.save:
        save_rows(RESULTS, results, key=lambda row: list(ROWS).index(row["row"]))


def make_models(folder: Path, *names: str) -> None:
    """Write the config and tokenizer of the named models, and questions whose rows all have --max_length tokens.

    custom-gpt needs no files.
    """
    for name in names:
        if name in MODELS:
            make_model_folder(folder / name, MODELS[name], TOKENS)
    passages = json.loads(SAMPLE.read_text())["data"][0]["paragraphs"]
    text = " ".join(passage["context"] for passage in passages)
    rows = [{"context": text, "question": f"What is {number}?", "answer": text[:500]} for number in range(100)]
    (folder / LONG).write_text("\n".join(map(json.dumps, rows)))


def read_results() -> dict:
    """Read the saved results."""
    return json.loads(RESULTS.read_text())


def train(folder: Path, row: Row) -> dict[str, float]:
    """Run a row. Return the predicted and the measured MiB of the rank with the highest peak."""
    model = GPT if row.model == "custom-gpt" else [str(folder / row.model), "--from_scratch"]
    words = ["--model_name", *model, "--dataset", str(SAMPLE), "--train_size", "64", "--eval_size", "2"]
    words += ["--no_em_f1", "--fp16", "False", "--max_length", "256", "--max_steps", str(STEPS)]
    words += ["--gradient_accumulation_steps", "2", "--per_device_train_batch_size", "4", "--eval_strategy", "no"]
    words += ["--save_strategy", "no", "--use_cpu"]
    words += [str(REPOSITORY / word) if word.endswith(".json") else word for word in row.flags]
    words += ["--eval_dataset", LONG] if LONG in words else []
    launched = row.ranks if row.ranks > 1 else 0
    output, record = run_training(folder, [__file__, "--child", *words], launched)
    parts = predicted_parts(record, python=MemoryPart("Python, libraries", 0))
    return {"predicted": round(totals(parts, 1)[1] / MIB, 1)} | read_result(output)


# The training


FIELDS = ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")


class MallInfo(ctypes.Structure):
    """glibc's struct mallinfo2."""

    _fields_ = [(name, ctypes.c_size_t) for name in FIELDS]


LIBC = ctypes.CDLL(None)
LIBC.mallinfo2.restype = MallInfo


def bytes_in_use() -> int:
    """Return the bytes that malloc has allocated and that are not yet freed."""
    info = LIBC.mallinfo2()
    return info.uordblks + info.hblkhd


class StepPeak(TorchDispatchMode, TrainerCallback):
    """Measure the peak of the last step: the most bytes in use after any operation, minus bytes outside tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self.other = 0  # bytes in use outside tensors when the step begins

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple = (), kwargs: dict | None = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.peak = max(self.peak, bytes_in_use())
        return result

    def on_step_begin(self, args: Any, state: Any, control: Any, model: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS - 1:
            gc.collect()
            tensors = [
                each for each in gc.get_objects() if isinstance(each, torch.Tensor) and each.device.type == "cpu"
            ]
            self.other = bytes_in_use() - sum(storages(tensors).values())
            self.peak = 0

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == STEPS:
            ranks = gather_lists([(self.peak - self.other) / MIB])
            print_once(RESULT + json.dumps({"measured": round(max(peak for (peak,) in ranks), 1)}))


def child(words: list[str]) -> None:
    """Train as train.py does. Rank 0 prints the highest peak of all ranks."""
    import train as script
    from distributed.process_group import run_and_exit

    peak = StepPeak()

    class MeasuredTrainer(script.WorkshopTrainer):
        def __init__(self, *args: Any, **kwargs: Any):
            super().__init__(*args, **kwargs)
            self.add_callback(peak)

    script.WorkshopTrainer = MeasuredTrainer
    sys.argv = [str(SCRIPTS / "train.py"), *words]
    with peak:
        run_and_exit(script.main)


def page_row(row: dict) -> str:
    predicted, measured = row["mib"]["predicted"], row["mib"]["measured"]
    cells = [row["row"], str(row["ranks"]), f"{predicted:.1f}", f"{measured:.1f}", f"{100 * difference(row):+.1f} %"]
    return "| " + " | ".join(cells) + " |"


def difference(row: dict) -> float:
    """(measured - predicted) / predicted, as in the report."""
    predicted, measured = row["mib"]["predicted"], row["mib"]["measured"]
    return measured / predicted - 1


def summary(results: dict) -> str:
    """Sentence of docs/results.md with the median absolute difference and the largest difference."""
    differences = {row["row"]: difference(row) for row in results["rows"]}
    worst = max(differences, key=lambda row: abs(differences[row]))
    median = statistics.median(map(abs, differences.values()))
    return (
        f"{len(differences)} training runs: the median difference, without its sign, is {100 * median:.1f} %, "
        f"the largest is {100 * differences[worst]:+.1f} % ({worst})"
    )


if __name__ == "__main__":
    main()
