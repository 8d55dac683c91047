"""Measure how many questions per second a process reads: from disk or memory, with and without data workers.

    python benchmarks/reading.py                  # the rows "disk" use a temporary folder in TMPDIR

The data set has as many questions as SQuAD's training set. It repeats the bundled sample, tokenised for tiny-bloom.
Each row reads questions as a training run does: in random order, in batches of 4, padded to the longest. No model is
trained. The fastest of five passes counts, because other programs may run on the machine. Some rows differ:

not read yet         the kernel has dropped the file from its page cache; one pass only
tokenised when read  the text of a question is tokenised when its batch is read
5 ms for each        a pause per question, as if each question were a file on a slow server

The last line shows the additional memory of a process that has opened the file and read all its tokens.
docs/efficiency.md shows the results.
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
    questions = load_from_file(DATA.dataset, "all", DATA)
    rows = tokenise(questions, tokenizer, DATA)
    with tempfile.TemporaryDirectory() as disk, tempfile.TemporaryDirectory(dir="/dev/shm") as memory:
        indices = [number % len(rows) for number in range(QUESTIONS)]
        rows.select(indices).save_to_disk(f"{disk}/rows", num_shards=1)
        shutil.copytree(f"{disk}/rows", f"{memory}/rows")
        (arrow,) = Path(disk, "rows").glob("*.arrow")
        print(f"{QUESTIONS} questions, {arrow.stat().st_size / 2**20:.0f} MiB")

        show("disk, not read yet", rate(load_from_disk(f"{disk}/rows"), collate, 0, before=partial(drop_cached, arrow)))
        for workers in (0, 2):
            show(f"disk, read before, {workers} workers", rate(load_from_disk(f"{disk}/rows"), collate, workers))
            show(f"/dev/shm, {workers} workers", rate(load_from_disk(f"{memory}/rows"), collate, workers))
        settings = {"max_length": DATA.max_length, "labels": DATA.labels}
        text = questions.select([number % len(questions) for number in range(QUESTIONS)]).flatten_indices()
        text.set_transform(partial(tokenise_batch, tokenizer=tokenizer, **settings))
        for workers in (0, 2):
            show(f"tokenised when read, {workers} workers", rate(text, collate, workers))
        for workers in (0, 2, 8):
            slow = partial(collate_after_pause, collate)
            show(f"5 ms for each, {workers} workers", rate(load_from_disk(f"{disk}/rows"), slow, workers, 1024))

        before = resident_mib()
        whole = load_from_disk(f"{disk}/rows").with_format("numpy", columns=["input_ids", "labels"])
        for batch in whole.iter(1000):
            del batch
        added = [after - earlier for after, earlier in zip(resident_mib(), before, strict=True)]
        print("all read: {:+.0f} MiB of its own memory, {:+.0f} MiB of file pages".format(*added))


def rate(rows: Dataset, collate, workers: int, count: int = 4096, before: Callable[[], None] | None = None) -> float:
    """Return the questions per second of the fastest pass. The clock starts after the workers' first batch.

    count: number of questions to read
    before: function to call before the pass; if it is given, there is only one pass
    """
    chosen = torch.randperm(len(rows), generator=torch.Generator().manual_seed(1))[:count].tolist()
    if rows.format["type"] != "custom":
        rows = rows.select_columns(COLUMNS)
    loader = DataLoader(
        Subset(rows, chosen), batch_size=4, collate_fn=partial(collate_rows, collate), num_workers=workers
    )
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


def collate_rows(collate, rows: list[dict]) -> dict:
    return collate([{name: row[name] for name in COLUMNS} for row in rows])


def collate_after_pause(collate, rows: list[dict]) -> dict:
    time.sleep(0.005 * len(rows))
    return collate(rows)


def resident_mib() -> tuple[float, float]:
    """Return the resident MiB of this process: its own memory, and pages of files."""
    status = Path("/proc/self/status").read_text()
    return tuple(int(re.search(rf"{name}:\s+(\d+)", status)[1]) / 1024 for name in ("RssAnon", "RssFile"))


def drop_cached(path: Path) -> None:
    """Ask the kernel to drop the file from its page cache."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def show(name: str, per_second: float) -> None:
    print(f"{name:32s} {per_second:8.0f} questions/s {4000 / per_second:8.2f} ms per batch of 4", flush=True)


if __name__ == "__main__":
    main()
