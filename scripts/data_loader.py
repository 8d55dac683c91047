"""The training set and the evaluation set: read, chosen, turned into tokens (tasks/), cached, and put into batches."""

import hashlib
import json
import math
import os
from functools import lru_cache
from itertools import chain
from pathlib import Path
from typing import NamedTuple

import torch
from datasets import Dataset, fingerprint, load_dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, TrainingArguments

from config import ALL, HUB_SIZES, IGNORED, DataArguments
from distributed.collectives import print_once
from read_questions import (
    FORMATS,
    HELD_OUT_EVERY,
    SHOWN,
    Reading,
    Row,
    check_rows,
    choose_part,
    read_file,
)
from shared.errors import WorkshopError, join_first
from shared.files import check_readable
from shared.hub import check_relative_path, file_system_errors, loading_errors, offline_without_network
from tasks import choose_task, task_of
from tasks.passage import PROMPT, UNANSWERABLE, answer_room, tokenise_answers
from tasks.task import RowError, Task, token_row, tokenise_texts

TOKENS = ["input_ids", "attention_mask", "labels"]
SQUAD_COLUMNS = ["id", "question", "context", "answers"]  # of squad on the Hub
LENGTH_MULTIPLE = 8  # tensor cores are most efficient with multiples of 8
ROW_MAKERS = ("data_loader.py", "read_questions.py", "shared/json_files.py", "tasks/*.py")
# The code that makes rows. It belongs to the keys of the caches, so that a change of the code has an effect
CODE = b"".join(path.read_bytes() for name in ROW_MAKERS for path in sorted(Path(__file__).parent.glob(name)))


class Data(NamedTuple):
    """The rows of tokens of a training run.

    train, evaluation: the columns are those of tasks/task.py::token_row and of the examples. left_out: the place and
    reason of each row that BAD_ROWS=skip has left out.
    """

    train: Dataset
    evaluation: Dataset
    left_out: list[str]


class Examples(NamedTuple):
    """The examples of one part. pieces: the part of their pieces to use, for a text with too few documents."""

    rows: Dataset
    left_out: list[str]
    pieces: str = "all"


def load_data(data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, training_args: TrainingArguments) -> Data:
    """Return the tokenised training set and evaluation set.

    The seed chooses the rows, so every rank gets the same ones. Raise WorkshopError (exit code 2) if a file is unusable
    or has fewer rows than requested.
    """
    requested = data_args.train_size
    if data_args.samples_per_gpu:
        requested = data_args.samples_per_gpu * training_args.world_size
    train, left_out = load_set("train", requested, data_args, tokenizer, training_args)
    evaluation, others = load_set("eval", data_args.eval_size, data_args, tokenizer, training_args)
    read_files.cache_clear()  # the training needs the memory
    if data_args.eval_dataset:
        task, other = task_of(train.column_names), task_of(evaluation.column_names)
        if task is not other:
            what = f"has the kind {other.name}, but --dataset has the kind {task.name}"
            raise WorkshopError("--eval_dataset", what, "give data of one kind")
        trained = {*map(task.unit_of, train.remove_columns(TOKENS))}
        if shared := sum(task.unit_of(row) in trained for row in evaluation.remove_columns(TOKENS)):
            what = f"are about a {task.unit} of" if task.group else "are also in"
            print_once(f"{shared} of {len(evaluation)} evaluation {task.rows} {what} the training set")
    return Data(train, evaluation, list(dict.fromkeys(left_out + others)))


def load_set(
    part: str,
    requested: int | str | None,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    training_args: TrainingArguments,
) -> tuple[Dataset, list[str]]:
    """Return the requested number of rows of one part (train or eval), tokenised, and the rows that were left out.

    The parts are independent.
    """
    # One rank of each node reads, tokenises and writes the cache. The other ranks wait, and then read the cache.
    with training_args.main_process_first(local=True, desc="tokenise"):
        examples = read_part(part, data_args)
        name = source(part, data_args)
        task = task_of(examples.rows.column_names)
        check_answers(task, name, data_args)
        tokenizer.chat_template = tokenizer.chat_template or task.template
        seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
        with file_system_errors():
            rows = cut_into_pieces(examples, tokenizer, data_args) if task.pieces else examples.rows
            size = resolve_size(part, requested, len(rows), name)
            available = len(rows)
            rows = rows.shuffle(seed=seed).select(range(size))
            if not task.pieces:
                rows = tokenise(rows, tokenizer, data_args)
        rows, unusable = remove_unusable(rows, name, data_args)
    use = {"train": "training", "eval": "evaluation"}[part]
    print_once(f"{use} {task.rows}: {len(rows)} of {available} available in {name}")
    if cut := sum(rows["cut"][:]):
        print_once(
            f"{cut} of {len(rows)} {use} {task.rows} were cut to --max_length; "
            f"{sum(rows['answer_cut'])} lost their answer"
        )
    return rows, examples.left_out + unusable


def check_answers(task: Task, name: str, data_args: DataArguments) -> None:
    """Raise WorkshopError (exit code 2) for knobs of answers if the data has none."""
    given = {"LABELS=sequence": data_args.labels == "answer", "EM_F1=False": data_args.em_f1, "SHOW=0": data_args.show}
    for without, value in given.items():
        if value and task.pieces:
            what = f"needs answers, but {name} has the kind {task.name}"
            raise WorkshopError(without.split("=")[0], what, f"set {without}")


def remove_unusable(rows: Dataset, name: str, data_args: DataArguments) -> tuple[Dataset, list[str]]:
    """Return the rows of tokens without those of examples that have none, and the place and reason of each of these."""
    places = [i for i, reason in enumerate(rows["unusable"]) if reason]
    if not places:
        return rows, []
    unusable = [f"{row['id']}: {row['unusable']}" for row in rows.select(places)]
    if data_args.bad_rows != "skip" or len(places) == len(rows):
        what = f"{len(places)} of {len(rows)} rows cannot be used: {join_first(unusable, most=SHOWN)}"
        raise WorkshopError(name, what, "correct them, or leave them out with BAD_ROWS=skip")
    print_once(f"left out: {join_first(unusable, most=SHOWN)}")
    return rows.select(sorted({*range(len(rows))} - {*places})), [f"{name}: {row}" for row in unusable]


def cut_into_pieces(examples: Examples, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> Dataset:
    """Return the pieces of documents, as rows of tokens."""
    rows = tokenise(examples.rows, tokenizer, data_args)
    return rows.select(
        choose_part(range(len(rows)), examples.pieces, data_args.dataset, f"{data_args.max_length}-token piece")
    )


def resolve_size(part: str, requested: int | str | None, available: int, name: str) -> int:
    """Return the number of rows to use: all of a local file, and a part of a Hub dataset, if none is requested.

    name: the file or Hub name. Raise WorkshopError (exit code 2) if too many are requested.
    """
    if requested == ALL or (requested is None and find_files(name)):
        return available
    size = min(HUB_SIZES[part], available) if requested is None else int(requested)
    if size > available:
        flag = {"train": "--train_size or --samples_per_gpu", "eval": "--eval_size"}[part]
        use = {"train": "train", "eval": "evaluate"}[part]
        what = f"{size} rows requested, but {name} has only {available} to {use} on"
        raise WorkshopError(flag, what, f"lower it, or give {ALL}")
    return size


def source(part: str, data_args: DataArguments) -> str:
    """Return the file or Hub name that provides the questions of a part."""
    return data_args.eval_dataset if part == "eval" and data_args.eval_dataset else data_args.dataset


def read_part(part: str, data_args: DataArguments) -> Examples:
    """Return all examples of a part (train or eval). Rows are held out if there are none for the evaluation."""
    name = source(part, data_args)
    part = "all" if data_args.eval_dataset else {"train": "train", "eval": "held out"}[part]
    if name == data_args.eval_dataset or find_files(name):
        return store(name, read_files(name, data_args), part, data_args)
    return load_from_hub(name, part, data_args)


def find_files(dataset: str) -> list[str]:
    """Return the local files of a dataset, none if it is a name on the Hub.

    The name of a folder could be a name on the Hub, so its path must begin with `/`, `.` or `~`, or end with `/`. Raise
    WorkshopError (exit code 2) for the path of a missing file.
    """
    path = os.path.expanduser(dataset)
    if os.path.isfile(path):
        return [dataset]
    if "," in dataset:
        return sorted(file for name in dataset.split(",") for file in find_files(name.strip()) or [name.strip()])
    check_relative_path("--dataset", dataset)
    check_readable(path)
    marked = dataset.startswith((".", "/", "~")) or dataset.endswith("/")
    files = sorted(str(file) for file in Path(path).glob("*") if marked and file.suffix.lower() in FORMATS)
    if not files and (marked or dataset.endswith(FORMATS)):
        missing = f"no file in it ends with {', '.join(FORMATS)}" if os.path.isdir(path) else "there is no such file"
        raise WorkshopError(dataset, missing, "correct --dataset")
    return files


def load_from_hub(name: str, part: str, data_args: DataArguments) -> Examples:
    offline_without_network()
    with loading_errors("--dataset", name):
        # Without hf://, a folder of this name in the working directory would be read instead
        splits = load_dataset(f"hf://datasets/{name}")
        validated = "validation" in splits
        questions = splits["validation" if validated and part == "held out" else "train"]
        names, first = questions.column_names, questions[0]
        squad = validated and {*SQUAD_COLUMNS} <= {*names} and isinstance(first["answers"], dict)
    if not squad or data_args.table_columns:
        task, columns = choose_task(name, names, data_args.table_columns, data_args.answers == "free", first)
        rows = [Row(f"row {number}", cells) for number, cells in enumerate(questions, 1)]
        reading = check_rows(name, task, columns, names, rows, data_args.bad_rows == "skip")
        print_once("\n".join(reading.notes))
        reading = reading._replace(content=questions._fingerprint.encode())
        return store(name, reading, "all" if validated else part, data_args)
    questions = questions.select_columns(SQUAD_COLUMNS)
    # Checkpoints of 2.0.0 contain a hash of this lambda, with its place in its line
    questions = questions.map(
        lambda example: {"answers": example["answers"]["text"] or [UNANSWERABLE]}, desc=f"Reading {name}"
    )
    return Examples(questions, [])


@lru_cache(maxsize=2)  # the tokenizer of tiny-bloom, the training set and the evaluation set are of the same files
def read_files(dataset: str, data_args: DataArguments) -> Reading:
    """Return what all files of a dataset have together. Raise WorkshopError (exit code 2) if their kinds differ."""
    options = data_args.table_columns, data_args.bad_rows == "skip", data_args.answers == "free"
    readings = {path: read_file(path, *options) for path in find_files(dataset) or [dataset]}
    found = {task_of(list(reading.examples[0])).name: path for path, reading in readings.items()}
    if len(found) > 1:
        what = ", ".join(f"{path} has the kind {kind}" for kind, path in found.items())
        raise WorkshopError(dataset, what, "give files of one kind")
    left_out = [f"{path}: {row}" for path, reading in readings.items() for row in reading.left_out]
    examples, notes, _, contents = zip(*readings.values(), strict=True)
    print_once("\n".join(chain(*notes)))  # here the lines appear once, although the data has two parts
    return Reading([*chain(*examples)], [], left_out, b"".join(contents))


def store(name: str, reading: Reading, part: str, data_args: DataArguments) -> Examples:
    """Return the examples of one part in a cache that all ranks of a node share.

    The cache key contains a hash of the files, so a changed file is read again.
    """
    task = task_of(list(reading.examples[0]))
    units = [task.unit_of(example) for example in reading.examples]
    pieces = "all"
    if task.pieces and len({*units}) < HELD_OUT_EVERY:
        part, pieces = "all", part
    chosen = choose_part(units, part, name, task.unit)
    skip, free = data_args.bad_rows == "skip", " free" * (data_args.answers == "free")
    options = f"{part} {data_args.table_columns} {skip} {UNANSWERABLE} {HELD_OUT_EVERY}{free}"
    key = reading.content + options.encode()
    with file_system_errors():
        rows = Dataset.from_generator(
            lambda: (reading.examples[number] for number in chosen), fingerprint=short_hash(key + CODE)
        )
    rows._fingerprint = short_hash(key)  # see tokenise
    return Examples(rows, reading.left_out, pieces)


def short_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> Dataset:
    """Return the rows of tokens of examples, see `tokenise_batch`.

    The result is cached. The cache key contains everything that the result depends on.
    """
    task = task_of(dataset.column_names)
    max_length, labels = data_args.max_length, data_args.labels or task.labels
    # Checkpoints of 2.0.0 contain a hash with version 6. It had other tokens with rules such as Llama-2's
    version = 6 if tokenise_answers(["a"], tokenizer) == tokenise_texts([" a"], tokenizer) else 7
    key = repr((version, dataset._fingerprint, tokenizer_key(tokenizer), PROMPT, max_length, labels)).encode()
    rows = dataset.map(
        lambda batch: tokenise_batch(batch, tokenizer, max_length, labels),
        batched=True,
        remove_columns=dataset.column_names,
        new_fingerprint=short_hash(key + CODE + str(tokenizer.chat_template).encode()),
        desc="Tokenising",
    )
    rows._fingerprint = short_hash(key)  # checkpoints of 2.0.0 contain this hash, which does not depend on the code
    return rows


def tokens_hash(rows: Dataset) -> str:
    """Return a hash of the tokens and labels of all rows, which identifies the data of a training run."""
    digest = hashlib.sha256()
    for batch in rows.select_columns(["input_ids", "labels"]).iter(1000):
        digest.update(repr((batch["input_ids"], batch["labels"])).encode())
    return digest.hexdigest()[:16]


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    """Return a hash of everything that `tokenise_batch` reads from the tokenizer."""
    if tokenizer.is_fast:
        # Each call sets padding and truncation again
        rules = json.loads(tokenizer.backend_tokenizer.to_str()) | {"padding": None, "truncation": None}
    else:
        # The rules are Python code and attributes, so this hashes the whole object
        rules = fingerprint.Hasher.hash(tokenizer)
    ids = [tokenizer.eos_token_id, tokenizer.unk_token_id, tokenizer.all_special_ids]
    return hashlib.sha256(json.dumps([rules, ids]).encode()).hexdigest()


def tokenise_batch(batch: dict, tokenizer: PreTrainedTokenizerBase, max_length: int, labels: str) -> dict:
    """Return the rows of tokens of examples (tasks/task.py::token_row), each with the columns of its example."""
    task = task_of(list(batch))
    rows = []
    for values in zip(*batch.values(), strict=True):
        example = dict(zip(batch, values, strict=True))
        try:
            encoded = task.encode(example, tokenizer, max_length, labels)
        except RowError as error:
            encoded = [token_row([], [], 0, unusable=str(error))]
        rows += [example | row for row in encoded]
    return {name: [row[name] for row in rows] for name in rows[0]}


def answer_limit(questions: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
    """Return the number of tokens that a generated answer may have: the longest reference answer and EOS fit.

    It is at least `answer_room`, and leaves enough of `max_length` for what a prompt needs, such as its question.
    """
    answers = (tokens for texts in questions["answers"] for tokens in tokenise_answers(texts, tokenizer))
    longest_answer = max(map(len, answers)) + 1
    task = task_of(questions.column_names)
    needed = max(task.least_prompt(example, tokenizer, max_length) for example in questions)
    return max(answer_room(max_length), min(longest_answer, max_length - needed))


class OneRow:
    """Collator for ``--padding none``: a micro batch is one row of its questions' tokens (models/padding_free.py).

    The row ends with a few tokens of padding, because a GPU needs time and memory for each new length (`round_up`).

    The tensors are int64. input_ids, labels, position_ids: (1, tokens). The first token of a question is not a target,
    because the token before it belongs to another question. rows: (questions, longest), the index of each token in the
    row, -1 where there is no token of a question. places: (tokens), the index of each token in the flattened `rows`.
    The row's padding has places after a question, where no token of a question attends to it.
    """

    padding = "none"
    label_pad_token_id = IGNORED

    def __call__(self, questions: list[dict]) -> dict[str, torch.Tensor]:
        lengths = [len(question["input_ids"]) for question in questions]
        longest = round_up(max(lengths), parts=2, largest=128)
        rows = torch.full((len(lengths) * longest,), -1)
        padding = min(round_up(sum(lengths), parts=4, largest=1024), len(rows)) - sum(lengths)
        places = torch.cat([number * longest + torch.arange(length) for number, length in enumerate(lengths)])
        rows[places] = torch.arange(len(places))
        tokens = [token for question in questions for token in question["input_ids"]]
        labels = [x for question in questions for x in (IGNORED, *question["labels"][1:])]
        positions = [position for length in lengths for position in range(length)]
        return {
            "input_ids": torch.tensor([tokens + [0] * padding]),
            "labels": torch.tensor([labels + [IGNORED] * padding]),
            "position_ids": torch.tensor([positions + [0] * padding]),
            "rows": rows.view(-1, longest),
            "places": torch.cat([places, (rows < 0).nonzero_static(size=padding).flatten()]),
        }


def round_up(tokens: int, parts: int, largest: int) -> int:
    """Round up to a multiple of a power of two: the last up to tokens / parts, but at least 8 and at most `largest`.

    With 4 parts, 1,190 questions of SQuAD give micro batches of 4, 16 and 64 questions at most 9, 4 and 4 lengths, and
    9, 9 and 5 % of their tokens are padding. For micro batches of 4, coarser steps would give 5 lengths and 16 %.
    """
    multiple = min(largest, 2 ** (max(tokens // parts, LENGTH_MULTIPLE).bit_length() - 1))
    return math.ceil(tokens / multiple) * multiple


def collator(tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> DataCollatorForSeq2Seq | OneRow:
    """Return a collator for batches of shape (micro batch, sequence), or of one row with ``--padding none``.

    Padded labels do not count in the loss, except with ``--labels all``.
    """
    if data_args.padding == "none":
        return OneRow()
    return DataCollatorForSeq2Seq(
        tokenizer,
        padding=data_args.padding,
        max_length=data_args.max_length,
        pad_to_multiple_of=LENGTH_MULTIPLE if data_args.padding == "longest" else None,
        label_pad_token_id=tokenizer.pad_token_id if data_args.labels == "all" else IGNORED,
    )
