"""Reading data: questions per second, from different places, with and without workers. Results: docs/efficiency.md.

    python benchmarks/reading.py                  # in a temporary folder of TMPDIR, for "disk"

The data are as many questions as SQuAD has to train on, the bundled sample again and again, tokenised for tiny-bloom.
Each line reads questions in random order, in batches of 4 padded to the longest, as a training does, and computes
nothing: the fastest of five passes, as other programs may run beside.

not read yet         the kernel has dropped the file from memory before; one pass
tokenised when read  the text of a question is tokenised for its batch
5 ms for each        a pause, as if each question were a file on a slow server

The last line is the memory that a process needs more, once it has opened the file and read all tokens of it.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from datasets import Dataset, load_from_disk
from torch.utils.data import DataLoader, Subset

REPOSITORY = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(REPOSITORY / "scripts"))

from config import DataArguments  # noqa: E402
from data_loader import collator, load_from_file, tokenise, tokenise_batch  # noqa: E402
from model import train_tokenizer  # noqa: E402

QUESTIONS = 87_599
COLUMNS = ["input_ids", "attention_mask", "labels"]
DATA = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"), padding="longest")


def main() -> None:
    torch.set_num_threads(1)
    tokenizer = train_tokenizer(DATA, 2048)
    collate = collator(tokenizer, DATA)
    questions = load_from_file(DATA.dataset, "all")
    rows = tokenise(questions, tokenizer, DATA)
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        indices = [number % len(rows) for number in range(QUESTIONS)]
        rows.select(indices).save_to_disk(f"{disk}/rows", num_shards=1)
        shutil.copytree(f"{disk}/rows", f"{memory}/rows")
        (arrow,) = Path(disk, "rows").glob("*.arrow")
        print(f"{QUESTIONS} questions, {arrow.stat().st_size / 2**20:.0f} MiB")

        line("disk, not read yet", rate(load_from_disk(f"{disk}/rows"), collate, 0, before=partial(forget, arrow)))
        for workers in (0, 2):
            line(f"disk, read before, {workers} workers", rate(load_from_disk(f"{disk}/rows"), collate, workers))
            line(f"/dev/shm, {workers} workers", rate(load_from_disk(f"{memory}/rows"), collate, workers))
        settings = {"max_length": DATA.max_length, "labels": DATA.labels}
        text = questions.select([number % len(questions) for number in range(QUESTIONS)]).flatten_indices()
        text.set_transform(partial(tokenise_batch, tokenizer=tokenizer, **settings))
        for workers in (0, 2):
            line(f"tokenised when read, {workers} workers", rate(text, collate, workers))
        for workers in (0, 2, 8):
            slow = partial(after_a_pause, collate)
            line(f"5 ms for each, {workers} workers", rate(load_from_disk(f"{disk}/rows"), slow, workers, 1024))

        before = memory_of_process()
        whole = load_from_disk(f"{disk}/rows").with_format("numpy", columns=["input_ids", "labels"])
        for batch in whole.iter(1000):
            del batch
        added = [after - earlier for after, earlier in zip(memory_of_process(), before, strict=True)]
        print("all read: {:+.0f} MiB of its own, {:+.0f} MiB of pages of files".format(*added))


def rate(rows: Dataset, collate, workers: int, count: int = 4096, before: Callable[[], None] | None = None) -> float:
    """Questions per second of the fastest pass, without the start of the workers and their first batch."""
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:count].tolist()
    if rows.format["type"] != "custom":
        rows = rows.select_columns(COLUMNS)
    loader = DataLoader(Subset(rows, chosen), batch_size=4, collate_fn=partial(batch_of, collate), num_workers=workers)
    rates = []
    for _ in range(1 if before else 5):
        if before:
            before()
        batches = iter(loader)
        next(batches)
        start = time.perf_counter()
        read = sum(len(batch["input_ids"]) for batch in batches)
        rates.append(read / (time.perf_counter() - start))
    return max(rates)


def batch_of(collate, rows: list[dict]) -> dict:
    return collate([{name: row[name] for name in COLUMNS} for row in rows])


def after_a_pause(collate, rows: list[dict]) -> dict:
    time.sleep(0.005 * len(rows))
    return collate(rows)


def memory_of_process() -> tuple[float, float]:
    """MiB that this process has resident: of its own, and as pages of files."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024 for name in ("RssAnon", "RssFile"))


def forget(path: Path) -> None:
    """Let the kernel drop what it keeps of this file."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def line(name: str, questions: float) -> None:
    print(f"{name:32s} {questions:8.0f} questions/s {4000 / questions:8.2f} ms per batch of 4", flush=True)


if __name__ == "__main__":
    main()
