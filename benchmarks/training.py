"""Compare settings of one training run: sequences per second, model state, peak memory and mean loss.

    python benchmarks/training.py                                 # all rows, three times each
    python benchmarks/training.py --repeats 1 --rows recipe all   # two rows, once
    python benchmarks/training.py --model 560m --micro_batch 2 --repeats 1     # bloom-560m itself: 14 GB
    python benchmarks/training.py --model 560m --micro_batch 2 --repeats 1 --rows padded "padded attention"
    python benchmarks/training.py --model 135m --repeats 5 --rows "answer chunked_loss" "answer lora"    # docs/lora.md
    pip install -r benchmarks/requirements.txt                    # for the row `trl`

Each row runs in its own process. A row trains two epochs on the same sequences, with micro batches of 4 and
accumulation 4 (`all`: 16 and 1). The first epoch is the warm-up, and the second is timed. Peak memory is the largest
resident set of the process. The model is a BLOOM of 67 million parameters with BLOOM's whole vocabulary and random
weights. 560m is bloom-560m and trains on 8 sequences. 135m is a Llama with the sizes of SmolLM2 and trains on 16.
--micro_batch sets the micro batch of all rows and turns accumulation off.

The rows take turns within each repeat, so that a slow phase of the machine does not affect only one row. The speed of a
row is the median of its ratios to its base within the repeats. Each run shows the load average of the minute before its
start and of its last minute. --save keeps the rows in training.json, from which docs/results.md has its table. With
`taskset -c 0` before the command, a run has one core and one thread. Its CPU time then depends little on other
programs.

`transformers` is the Trainer of transformers with its defaults: fp32, and padding to the longest of a batch. `trl` is
TRL's SFTTrainer with its defaults: bf16, activation checkpointing, its own loss without logits, and a learning rate of
2e-5. These defaults change its mean loss. `trl packed` also packs several questions into each row.

`--equal` compares the full with the chunked loss in fp32 instead: the losses of 20 steps, and the gradients of a batch.
`--overheads` times the start-up of the commands, and psrecord's share of a core.
"""

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path

from harness import (
    REPOSITORY,
    RESULT,
    SAMPLE,
    SCRIPTS,
    XQUAD,
    commit,
    cpu,
    make_model_folder,
    read_result,
    run_training,
)

DATASET = XQUAD if XQUAD.exists() else SAMPLE
TOKENS = 30000  # vocabulary of the tokenizer; sequences are then about as long as with BLOOM's own tokenizer
BLOOM = {"model_type": "bloom", "vocab_size": 250880}
LLAMA = {"model_type": "llama", "vocab_size": 49152, "num_key_value_heads": 3, "tie_word_embeddings": True}
SIZES = {
    "tiny": BLOOM | {"vocab_size": TOKENS, "hidden_size": 64, "n_layer": 2, "n_head": 4},  # to try this file
    "67m": BLOOM | {"hidden_size": 256, "n_layer": 4, "n_head": 4},
    "135m": LLAMA | {"hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9},
    "560m": BLOOM | {"hidden_size": 1024, "n_layer": 24, "n_head": 16},
}
SEQUENCES = {"tiny": 16, "67m": 32, "135m": 16, "560m": 8}
LOGGED_SECONDS = 120
RESULTS = Path(__file__).with_suffix(".json")
EQUAL_STEPS = 20

BF16 = ["--bf16"]
DYNAMIC = ["--padding", "longest"]
SDPA = ["--attention", "sdpa"]
NO_PADDING = [*SDPA, "--padding", "none"]
CHUNKED = [*NO_PADDING, *BF16, "--loss", "chunked"]
ALL = [*CHUNKED, "--per_device_train_batch_size", "16", "--gradient_accumulation_steps", "1"]
ANSWER = ["--labels", "answer"]
PADDED = ["--loss", "chunked"]  # pads to --max_length, so that the attention scores are large
LONG = [*PADDED, "--max_length", "1024"]


@dataclass
class Row:
    """One setting to measure.

    base: name of the row that the ratios are relative to
    program: the library whose Trainer `child` uses
    """

    flags: list[str]
    base: str = "recipe"
    program: str = "workshop"


ROWS = {
    "recipe": Row([]),
    "dynamic_padding": Row(DYNAMIC),
    "attention": Row([*DYNAMIC, *SDPA]),
    "no_padding": Row(NO_PADDING),
    "bf16": Row([*NO_PADDING, *BF16]),
    "chunked_loss": Row(CHUNKED),
    "activation_checkpointing": Row([*CHUNKED, "--activation_checkpointing"]),
    "all": Row(ALL),
    "transformers": Row([], program="transformers"),
    "trl": Row([], program="trl"),
    "trl packed": Row([], program="trl packed"),
    "answer recipe": Row(ANSWER, base="answer recipe"),
    "answer chunked_loss": Row([*ANSWER, *CHUNKED], base="answer recipe"),
    "answer lora": Row([*ANSWER, *CHUNKED, "--lora_rank", "8"], base="answer chunked_loss"),
    "answer all": Row([*ANSWER, *ALL], base="answer recipe"),
    "padded": Row(PADDED, base="padded"),
    "padded attention": Row([*PADDED, *SDPA], base="padded"),
    "padded 1024": Row(LONG, base="padded 1024"),
    "padded 1024 attention": Row([*LONG, *SDPA], base="padded 1024"),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--model", choices=SIZES, default="67m")
    parser.add_argument("--micro_batch", type=int, help="micro batch of all rows, without accumulation")
    parser.add_argument("--save", action="store_true", help=f"replace these rows in {RESULTS.name}")
    parser.add_argument("--equal", action="store_true", help="compare losses and gradients instead of timing")
    parser.add_argument("--overheads", action="store_true", help="time only start-up and loggers")
    parser.add_argument("--child", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        child(arguments.child[0], arguments.child[1:])
        return
    if arguments.overheads:  # before large imports: a child's measured peak is never below its parent's
        start_up(arguments.repeats)
        first_steps(arguments.repeats)
        loggers()
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        make_model_folder(folder / "model", SIZES[arguments.model], TOKENS, DATASET)
        print(f"commit {commit()}, {len(os.sched_getaffinity(0))} cores, {cpu()}, {DATASET.name}", flush=True)
        if arguments.equal:
            compare(folder)
        else:
            common = ["--train_size", str(SEQUENCES[arguments.model])]
            if arguments.micro_batch:
                common += ["--per_device_train_batch_size", str(arguments.micro_batch)]
                common += ["--gradient_accumulation_steps", "1"]
            rows = measure(folder, arguments.rows, arguments.repeats, common)
            machine = {"model": arguments.model, "micro_batch": arguments.micro_batch, "repeats": arguments.repeats}
            machine |= {"commit": commit(), "cpu": cpu(), "cores": len(os.sched_getaffinity(0))}
            rows = [machine | row for row in rows]
            print(page_table(rows))
            if arguments.save:
                save(rows)


def measure(folder: Path, names: list[str], repeats: int, common: list[str]) -> list[dict]:
    """Run the rows in turns, and return the figures of each."""
    if not find_spec("trl"):
        skipped = [name for name in names if ROWS[name].program.startswith("trl")]
        names = [name for name in names if name not in skipped]
        if skipped:
            print(f"trl is not installed, so {skipped} are skipped; run pip install -r benchmarks/requirements.txt")
    results: dict[str, list[dict]] = {name: [] for name in names}
    for repeat in range(repeats):
        for name in names:
            load = os.getloadavg()[0]
            result = train(folder, ROWS[name].program, [*common, *ROWS[name].flags])
            result["load"] = [round(each, 1) for each in (load, os.getloadavg()[0])]
            results[name].append(result)
            rate, peak = result["samples_per_second"], result["peak_mib"]
            loads = "load {} to {}".format(*result["load"])
            print(f"  {repeat + 1}. {name:26s} {rate:8.3f} samples/s {peak:8.0f} MiB, {loads}", flush=True)
    return [figures(name, results) for name in names]


def figures(name: str, results: dict[str, list[dict]]) -> dict:
    """Return the medians of a row, and its ratios to its base."""
    runs, base = results[name], results.get(ROWS[name].base)
    rates = [run["samples_per_second"] for run in runs]
    rate, peak = statistics.median(rates), statistics.median(run["peak_mib"] for run in runs)
    found = {
        "row": name,
        "samples_per_second": round(rate, 3),
        "range": [round(min(rates), 3), round(max(rates), 3)],
        "cpu_seconds_per_sample": round(statistics.median(run["cpu_seconds_per_sample"] for run in runs), 3),
        "tokens_per_second": round(rate * runs[0]["tokens_per_sequence"]),
        "state_mib": runs[0]["state_mib"],
        "peak_mib": round(peak),
        "mfu_percent": runs[0]["mfu_percent"],
        "mean_loss": round(runs[0]["loss"], 4),
        "loads": [run["load"] for run in runs],
    }
    if base:
        speeds = [own / run["samples_per_second"] for own, run in zip(rates, base, strict=True)]
        found["speed"] = round(statistics.median(speeds), 2)
        found["speed_range"] = [round(min(speeds), 2), round(max(speeds), 2)]
        found["memory"] = round(peak / statistics.median(run["peak_mib"] for run in base), 2)
    return found


def save(rows: list[dict]) -> None:
    """Replace these rows in the file."""
    replaced = {(row["model"], row["micro_batch"], row["row"]): row for row in [*read_results(), *rows]}
    lines = ",\n".join(json.dumps(row) for row in replaced.values())
    RESULTS.write_text(f"[\n{lines}\n]\n")


def read_results() -> list[dict]:
    return json.loads(RESULTS.read_text())


def page_table(rows: list[dict]) -> str:
    """Table of docs/results.md. A run of an older version of this program has no load."""
    heads = ["Model", "Micro batch", "Row", "Samples/s", "Peak GiB", "MFU (%)", "Speed", "Memory", "Load"]
    lines = [heads, ["---"] * len(heads)]
    for row in rows:
        ratios = [f"{row['speed']:.1f}x", f"{row['memory']:.2f}x"] if "speed" in row else ["", ""]
        rates = [f"{row['samples_per_second']:.3f}", f"{row['peak_mib'] / 1024:.1f}", row["mfu_percent"] or ""]
        load = max(map(max, row["loads"]), default="")
        lines.append([row["model"], row["micro_batch"] or "4 x 4", row["row"], *rates, *ratios, load])
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def compare(folder: Path) -> None:
    """Compare the full with the chunked loss in fp32: the losses of each step, and the gradients of one batch."""
    short = [*DYNAMIC, "--max_length", "128", "--max_steps", str(EQUAL_STEPS), "--train_size", "320"]
    full = train(folder, "workshop", short)["losses"]
    chunked = train(folder, "workshop", [*short, "--loss", "chunked"])["losses"]
    largest = max(abs(a - b) for a, b in zip(full, chunked, strict=True))
    print(f"losses of {len(full)} steps, {full[0]:.4f} to {full[-1]:.4f}: largest difference {largest:.1e}")
    for name, difference in train(folder, "gradients", [])["gradients"].items():
        print(f"gradient of {name:30s} relative difference {difference:.1e}")


def train(folder: Path, program: str, flags: list[str]) -> dict:
    words = ["--model_name", "./model", "--from_scratch", "--dataset", str(DATASET)]
    words += ["--train_size", "32", "--eval_size", "8", "--eval_strategy", "no", "--save_strategy", "no"]
    words += ["--no_em_f1", "--bf16", "False", "--num_train_epochs", "2", "--logging_steps", "1", "--use_cpu", *flags]
    threads = str(len(os.sched_getaffinity(0)))
    output, record = run_training(folder, [__file__, "--child", program, *words], OMP_NUM_THREADS=threads)
    held = record.get("held", [{}])[0]  # of the only rank; transformers and TRL write no record
    recorded = {"mfu_percent": record.get("train", {}).get("mfu_percent")}
    recorded["state_mib"] = round(sum(held.values()) / 2**20) if held else None
    return read_result(output) | recorded


def start_up(repeats: int) -> None:
    """Print the median seconds and the peak memory of imports and of commands that do not train."""
    commands = {
        "import torch and transformers": ["-c", "import torch, transformers.training_args"],
        "imports of train.py": ["-c", f"import sys; sys.path.insert(0, {str(SCRIPTS)!r}); import train"],
        "train.py --help": [str(SCRIPTS / "train.py"), "--help"],
        "train.py --no_such_flag": [str(SCRIPTS / "train.py"), "--no_such_flag"],
        "estimate_memory.py --help": [str(SCRIPTS / "estimate_memory.py"), "--help"],
        "estimate_memory.py": [str(SCRIPTS / "estimate_memory.py")],
    }
    for name, words in commands.items():
        runs = [timed([sys.executable, *words]) for _ in range(repeats)]
        seconds = statistics.median(seconds for seconds, _, _ in runs)
        print(f"{name:32s} {seconds:6.2f} s {max(mib for _, _, mib in runs):6.0f} MiB")


def first_steps(repeats: int) -> None:
    """Print the median seconds from the start of train.py to the end of its first step (tiny-bloom, warm caches)."""
    ways = {"plain": [], "ZeRO-2": ["--deepspeed", str(REPOSITORY / "ds_configs" / "zero2.json")], "FSDP": ["--fsdp"]}
    for name, flags in ways.items():
        runs = [time_to_first_step(flags) for _ in range(repeats + 1)][1:]  # the first run fills the caches
        print(f"{f'first step of train.py, {name}':32s} {statistics.median(runs):6.2f} s")


def time_to_first_step(flags: list[str]) -> float:
    words = ["--model_name", "tiny-bloom", "--dataset", str(SAMPLE), *flags]
    words += ["--train_size", "32", "--eval_size", "8", "--max_steps", "2", "--no_em_f1", "--save_strategy", "no"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, str(SCRIPTS / "train.py"), *words]
        streams = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        with subprocess.Popen(command, cwd=folder, text=True, **streams) as process:
            for line in process.stdout:
                if line.startswith("step 1 of"):
                    seconds = time.perf_counter() - start
    return seconds


def loggers() -> None:
    """Print the CPU time of psrecord, including its start, with the interval of a cluster (5 s) and a laptop (1 s).

    The watched process only sleeps. psrecord reads the same few lines of /proc for a busy process.
    """
    watched = subprocess.Popen([sys.executable, "-c", "import time, torch\ntime.sleep(10000)"])
    psrecord = str(Path(sys.executable).parent / "psrecord")
    try:
        for interval in (5, 1):
            flags = ["--include-children", "--interval", str(interval), "--duration", str(LOGGED_SECONDS)]
            seconds, cpu_seconds, _ = timed([psrecord, str(watched.pid), *flags, "--log", os.devnull])
            share = 100 * cpu_seconds / seconds
            usage = f"{cpu_seconds:.2f} s of CPU in {seconds:.0f} s, {share:.2f} % of a core"
            print(f"psrecord every {interval} s: {usage}", flush=True)
    finally:
        watched.kill()
        watched.wait()


def timed(words: list[str]) -> tuple[float, float, float]:
    """Run a command. Return its seconds, CPU seconds and peak MiB."""
    start = time.perf_counter()
    process = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, _, used = os.wait4(process.pid, 0)
    process.returncode = 0  # os.wait4 has already waited for the process
    return time.perf_counter() - start, used.ru_utime + used.ru_stime, used.ru_maxrss / 1024


# --- Code that runs in the process of a row


def child(program: str, flags: list[str]) -> None:
    sys.path.insert(0, str(SCRIPTS))
    if program == "gradients":
        print(RESULT + json.dumps({"gradients": gradients(flags)}), flush=True)
        return
    from transformers import TrainerCallback
    from transformers import trainer as trainer_module

    class Clock(TrainerCallback):
        """Record the end time, the CPU time and the loss of each step, for any Trainer."""

        def __init__(self):
            self.ends: list[float] = []
            self.cpu_ends: list[float] = []
            self.losses: list[float] = []

        def on_step_end(self, args, state, control, **kwargs):
            self.ends.append(time.perf_counter())
            self.cpu_ends.append(time.process_time())
            self.steps_per_epoch = state.max_steps // round(args.num_train_epochs)

        def on_log(self, args, state, control, logs=None, **kwargs):
            self.losses += [logs["loss"]] if "loss" in (logs or {}) else []

        def on_train_end(self, args, state, control, **kwargs):
            peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
            first = self.steps_per_epoch - 1
            rate = len(dataset) / (self.ends[-1] - self.ends[first])
            result = {"samples_per_second": rate, "peak_mib": peak, "losses": self.losses}
            result["cpu_seconds_per_sample"] = (self.cpu_ends[-1] - self.cpu_ends[first]) / len(dataset)
            print(RESULT + json.dumps(result | {"loss": statistics.fmean(self.losses)} | tokens), flush=True)

    trainer_module.DEFAULT_CALLBACKS.append(Clock())
    dataset, tokenizer, make_model = make_parts(flags)
    tokens = {"tokens_per_sequence": statistics.fmean(dataset["length"])}
    if program == "workshop":
        import train

        sys.argv[1:] = flags
        train.run_and_exit(train.main)
    model = make_model()
    given = {"output_dir": "output", "num_train_epochs": 2, "per_device_train_batch_size": 4, "use_cpu": True}
    given |= {"gradient_accumulation_steps": 4, "save_strategy": "no", "report_to": "none", "logging_steps": 1}
    if program == "transformers":
        from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

        collator = DataCollatorForSeq2Seq(tokenizer)
        Trainer(model, TrainingArguments(**given), collator, dataset).train()
    else:
        from trl import SFTConfig, SFTTrainer

        inputs = dataset.select_columns(["input_ids"])
        config = SFTConfig(**given, max_length=512, packing=program == "trl packed")
        SFTTrainer(model, config, train_dataset=inputs, processing_class=tokenizer).train()


def make_parts(flags: list[str]) -> tuple:
    """Return the workshop's training questions, its tokenizer, and a function that makes its model."""
    from transformers import TrainingArguments

    from data_loader import load_data
    from model import load_model, load_tokenizer
    from settings.command_line import parse_command_line
    from settings.trainer_flags import trainer_flags

    settings = parse_command_line("", flags)
    args = TrainingArguments(**trainer_flags(settings))
    tokenizer = load_tokenizer(settings.model, settings.data)
    dataset = load_data(settings.data, tokenizer, args).train
    return dataset, tokenizer, lambda: load_model(settings.model, tokenizer, args.seed)


def gradients(flags: list[str]) -> dict[str, float]:
    """Return the relative difference (L2 norm) between the gradients of the full and the chunked loss, in fp32.

    BLOOM's head shares its weight with the embedding, so this weight's gradient has a part from both.
    """
    import torch
    from transformers import DataCollatorForSeq2Seq

    from models.chunked_loss import use_chunked_loss

    dataset, tokenizer, make_model = make_parts(flags)
    model = make_model()
    rows = [{name: row[name] for name in ("input_ids", "attention_mask", "labels")} for row in dataset.select(range(4))]
    batch = DataCollatorForSeq2Seq(tokenizer)(rows)
    found = []
    for prepare in (lambda _: None, use_chunked_loss):
        prepare(model)
        model.zero_grad()
        model(**batch).loss.backward()
        found.append({name: weight.grad.clone() for name, weight in model.named_parameters()})
    full, chunked = found
    shown = [name for name in full if "h." not in name or "h.0." in name]
    return {name: float(torch.norm(chunked[name] - full[name]) / torch.norm(full[name])) for name in shown}


if __name__ == "__main__":
    main()
