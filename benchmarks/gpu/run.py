"""Measure one GPU: the speed of the efficiency knobs, parts of a step, and offload.

    python benchmarks/gpu/run.py                              # all items
    python benchmarks/gpu/run.py --groups fast micro          # only these groups
    python benchmarks/gpu/run.py --only all all-longest       # only these items; --help names all
    python benchmarks/gpu/run.py --cpu --only all             # try items without a GPU, with tiny models

README.md in this folder explains the groups and the results. The exit code is 3 if an item fails.
"""

import argparse
import json
import os
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import Any

from items import GROUPS, ITEMS, QUESTIONS, REPOSITORY, SMOLLM2, Item
from processes import become, kill, starter, wait

from checks.machine import last_line
from gpu_check import COLUMNS, figures, training_environment
from reporting.render import grid
from shared.errors import ENVIRONMENT, OneLineErrors, run_program

RESULT = "RESULT "  # prefix of the lines of JSON that programs other than train.py print
CPU_STEPS = 8  # --profile needs seven
CPU_GUARD = 600  # seconds until an item is killed on a CPU, which may be slow or busy


class Session:
    """Runs items one after the other, and keeps their rows. All items run in `folder`."""

    def __init__(self, folder: Path, cpu: bool, fork: bool):
        self.folder, self.cpu = folder, cpu
        cores = os.environ.get("OMP_NUM_THREADS") or str(len(os.sched_getaffinity(0)))
        self.environment = training_environment(folder, cpu) | {"HF_HUB_OFFLINE": "1", "REQUIRE_GPU": str(int(not cpu))}
        self.environment |= {"OMP_NUM_THREADS": cores}
        self.context = starter(fork)
        self.running: Any = None  # the process

    def start(self, item: Item, log: Path) -> None:
        """Start an item, whose output goes into a log."""
        words = item.flags.split()
        if item.steps:
            words += ["--max_steps", str(min(item.steps, CPU_STEPS) if self.cpu else item.steps)]
        if self.cpu and item.program == "scripts/gpu_check.py":
            words += ["--cpu", "--timeout", str(CPU_GUARD)]
        argv = [str(REPOSITORY / word) if word.endswith((".py", ".json")) else word for word in [item.program, *words]]
        variables = self.environment | item.variables | ({"MAX_LENGTH": "128"} if self.cpu else {})
        variables["JOB_ID"] = item.name
        self.running = self.context.Process(target=become, args=(argv, variables, self.folder, log))
        self.running.start()

    def run(self, item: Item, seconds: float) -> dict:
        """Run an item and return its row."""
        start = time.monotonic()
        row = {"name": item.name, "variables": item.variables, "flags": item.flags}
        try:
            row |= self.measure(item, seconds)
        except Exception as error:  # a mistake in one item must not end the session
            row |= {"status": "failed", "reason": repr(error)}
        finally:
            if self.running:
                kill(self.running)
        row["seconds"] = round(time.monotonic() - start, 1)
        return row

    def measure(self, item: Item, seconds: float) -> dict:
        """Run an item to its end, without the files of an earlier run of this item."""
        names = (f"{item.name}.log", f"results/{item.name}.json", f"output/{item.name}")
        log, record, output = (self.folder / name for name in names)
        record.unlink(missing_ok=True)
        shutil.rmtree(output, ignore_errors=True)
        log.write_text("")
        self.start(item, log)
        code = wait(self.running, seconds)
        printed = log.read_text(errors="replace")
        recorded = json.loads(record.read_text()) if record.exists() else {}
        row = judge(code, printed, recorded)
        lines = [line for line in printed.splitlines() if line.startswith(RESULT)]
        row["lines"] = [json.loads(line.removeprefix(RESULT)) for line in lines]
        shutil.rmtree(output, ignore_errors=True)
        return row | (figures_of_item(recorded) if recorded and row["status"] == "completed" else {})


def judge(code: int | None, log: str, record: dict) -> dict:
    """Return the status of a program by its exit code, and the reason if it did not complete."""
    if code == 0:
        return {"status": "completed"}
    status = "timeout" if code is None else "oom" if record.get("status") == "oom" else "failed"
    return {"status": status, "reason": last_line(log)}


def figures_of_item(record: dict) -> dict:
    """Return what the run record says."""
    kept = ("held", "peak_gpu_memory", "profile", "git", "hardware", "versions", "missing")
    found = figures(record | {"eval": record.get("eval") or [{"loss": None}]})
    return found | {name: record.get(name) for name in kept}


def make_model(folder: Path, cpu: bool) -> None:
    """Save bloom-560m with random weights, or tiny-bloom, and a tokenizer that is trained on the questions.

    Also save the sizes of further models. The runs draw their weights.

    All items load these weights, which is faster than to draw them again for each item.
    """
    from config import DataArguments, ModelArguments
    from model import load_config, random_model, train_tokenizer

    config = load_config(ModelArguments("tiny-bloom" if cpu else "bigscience/bloom-560m", from_scratch=True))
    tokens = min(32768, config.vocab_size)
    train_tokenizer(DataArguments(dataset=QUESTIONS["DATASET"]), tokens).save_pretrained(folder)
    random_model(config, 42).save_pretrained(folder)
    for name, sizes in SMOLLM2.items():
        sizes |= {"model_type": "llama", "vocab_size": 49152, "tie_word_embeddings": True}
        if cpu:
            sizes |= {"num_hidden_layers": 1, "hidden_size": 8 * sizes["num_attention_heads"], "vocab_size": tokens}
        folder.with_name(name).mkdir(exist_ok=True)
        (folder.with_name(name) / "config.json").write_text(json.dumps(sizes))


def results_page(rows: list[dict]) -> str:
    """Return the table of all items, and one of the lines that programs other than trainings have printed."""
    shown = [key for key in COLUMNS if any(row.get(key) is not None for row in rows)]
    body = []
    for row in rows:
        values = [row.get(key) for key in shown]
        cells = ["" if x is None else f"{x:,.{COLUMNS[key][1]}f}" for key, x in zip(shown, values, strict=True)]
        body.append([row["name"], row["status"], row.get("precision") or "", *cells])
    table = grid(["Item", "Status", "Precision", *(COLUMNS[key][0] for key in shown)], body)
    lines = [f"- {row['name']}: {json.dumps(line)}" for row in rows for line in row.get("lines", [])]
    reasons = [f"- {row['name']}: {row['reason']}" for row in rows if "reason" in row]
    return "\n".join([table, "", *reasons, *lines, ""])


def choose(groups: list[str], names: list[str], cpu: bool) -> list[Item]:
    """Return the items of the groups or with the names, by default all."""
    chosen = {item.name for group in groups for item in GROUPS[group]} | set(names) or {item.name for item in ITEMS}
    return [item for item in ITEMS if item.name in chosen and not (cpu and item.gpu_only)]


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", nargs="+", default=[], choices=GROUPS, help=f"some of {', '.join(GROUPS)}")
    names = [item.name for item in ITEMS]
    parser.add_argument("--only", nargs="+", default=[], metavar="ITEM", choices=names, help=", ".join(names))
    parser.add_argument("--cpu", action="store_true", help="run without a GPU, with tiny models, to try the items")
    parser.add_argument(
        "--seconds", type=float, default=1800, help="skip what does not fit into this time (%(default)s)"
    )
    parser.add_argument("--output", type=Path, default=Path("results/gpu"), help="folder of the results (%(default)s)")
    parser.add_argument("--no-fork", action="store_true", help="start each item as a new Python, which is slower")
    arguments = parser.parse_args()
    items = choose(arguments.groups, arguments.only, arguments.cpu)
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    ends = time.monotonic() + arguments.seconds
    folder = arguments.output.absolute()
    folder.mkdir(parents=True, exist_ok=True)
    session = Session(folder, arguments.cpu, not arguments.no_fork)
    rows = []
    if any(item.variables.get("TOKENIZER_NAME") == "./model" for item in items):
        make_model(folder / "model", arguments.cpu)
    with (folder / "items.jsonl").open("w", buffering=1) as lines:
        for item in items:
            left = ends - time.monotonic()
            row = {"name": item.name, "status": "skipped", "reason": "too little time is left"}
            if left > item.guard / 3:
                row = session.run(item, min(left, CPU_GUARD if arguments.cpu else item.guard))
            rows.append(row)
            lines.write(json.dumps(row) + "\n")
            reason = f" ({row['reason']})" if "reason" in row else ""
            print(f"{item.name}: {row['status']}{reason}, {row.get('seconds', 0)} s", flush=True)
    page = results_page(rows)
    (folder / "items.md").write_text(page)
    print(f"\n{page}\nwritten: {folder}/items.jsonl, {folder}/items.md and the run records in {folder}/results")
    if any(row["status"] not in ("completed", "skipped") for row in rows):
        sys.exit(ENVIRONMENT)


if __name__ == "__main__":
    run_program(main)
