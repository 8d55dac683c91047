"""The training set and the evaluation set: read, chosen, turned into tokens (tasks/), cached, and put into batches."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import torch
from datasets import Dataset, fingerprint, load_dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, TrainingArguments

from config import ALL, HUB_SIZES, IGNORED, DataArguments
from distributed.collectives import print_once
from read_questions import FORMATS, HELD_OUT_EVERY, READABLE, choose_part, read_file, read_questions, shorten_list
from shared.errors import WorkshopError
from shared.files import check_readable
from shared.hub import check_relative_path, file_system_errors, loading_errors, offline_without_network
from shared.json_files import read_bytes
from tasks import task_of
from tasks.passage import PROMPT, UNANSWERABLE, answer_room, tokenise_answers
from tasks.task import RowError, token_row, tokenise_texts

LENGTH_MULTIPLE = 8  # tensor cores are most efficient with multiples of 8
ROW_MAKERS = ("data_loader.py", "read_questions.py", "shared/json_files.py", "tasks/*.py")
# The code that makes rows. It belongs to the keys of the caches, so that a change of the code has an effect
CODE = b"".join(path.read_bytes() for name in ROW_MAKERS for path in sorted(Path(__file__).parent.glob(name)))
LEFT_OUT: dict[str, list[str]] = {}  # file -> place and reason of each row that BAD_ROWS=skip has left out


def load_squad(
    data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, training_args: TrainingArguments
) -> tuple[Dataset, Dataset]:
    """Return the tokenised training set and evaluation set.

    The columns are those of `tokenise_batch`, and id, question, context, answers. The seed chooses the questions, so
    every rank gets the same ones. Raise WorkshopError (exit code 2) if a file is unusable or has fewer questions than
    requested.
    """
    requested = data_args.train_size
    if data_args.samples_per_gpu:
        requested = data_args.samples_per_gpu * training_args.world_size
    train = load_set("train", requested, data_args, tokenizer, training_args)
    evaluation = load_set("eval", data_args.eval_size, data_args, tokenizer, training_args)
    if data_args.eval_dataset:
        task = task_of(train.column_names)
        trained = {task.unit_of(row) for row in train}
        if shared := sum(task.unit_of(row) in trained for row in evaluation):
            what = f"are about a {task.unit} of" if task.group else "are also in"
            print_once(f"{shared} of {len(evaluation)} evaluation {task.rows} {what} the training set")
    return train, evaluation


def load_set(
    part: str,
    requested: int | str | None,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    training_args: TrainingArguments,
) -> Dataset:
    """Return the requested number of questions of one part (train or eval), tokenised. The parts are independent."""
    # One rank of each node reads, tokenises and writes the cache. The other ranks wait, and then read the cache.
    with training_args.main_process_first(local=True, desc="tokenise"):
        questions = read_part(part, data_args)
        name = source(part, data_args)
        size = resolve_size(part, requested, len(questions), name)
        use = {"train": "training", "eval": "evaluation"}[part]
        kind = task_of(questions.column_names).rows
        print_once(f"{use} {kind}: {size} of {len(questions)} available in {name}")
        seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
        with file_system_errors():
            rows = tokenise(questions.shuffle(seed=seed).select(range(size)), tokenizer, data_args)
    if cut := sum(rows["cut"][:]):
        print_once(
            f"{cut} of {size} {use} {kind} were cut to --max_length; {sum(rows['answer_cut'])} lost their answer"
        )
    return rows


def resolve_size(part: str, requested: int | str | None, available: int, name: str) -> int:
    """Return the number of questions to use: all of a local file, and a part of a Hub dataset, if none is requested.

    name: the file or Hub name. Raise WorkshopError (exit code 2) if too many are requested.
    """
    if requested == ALL or (requested is None and is_local(name)):
        return available
    size = min(HUB_SIZES[part], available) if requested is None else int(requested)
    if size > available:
        flag = {"train": "--train_size or --samples_per_gpu", "eval": "--eval_size"}[part]
        use = {"train": "train", "eval": "evaluate"}[part]
        what = f"{size} questions requested, but {name} has only {available} to {use} on"
        raise WorkshopError(flag, what, f"lower it, or give {ALL}")
    return size


def source(part: str, data_args: DataArguments) -> str:
    """Return the file or Hub name that provides the questions of a part."""
    return data_args.eval_dataset if part == "eval" and data_args.eval_dataset else data_args.dataset


def read_part(part: str, data_args: DataArguments) -> Dataset:
    """Return all questions of a part (train or eval), with the columns id, question, context, answers."""
    if part == "eval" and data_args.eval_dataset:
        return load_from_file(data_args.eval_dataset, "all", data_args)
    if not is_local(data_args.dataset):
        if data_args.table_columns:
            what = f"has no effect on {data_args.dataset}, which is a dataset of the Hub"
            raise WorkshopError("TABLE_COLUMNS", what, "unset it")
        return load_from_hub(data_args.dataset, part)
    whole = {"train": "all"} if data_args.eval_dataset else {"train": "train", "eval": "held out"}
    return load_from_file(data_args.dataset, whole[part], data_args)


def is_local(dataset: str) -> bool:
    """Return whether the dataset is a local file, not a name on the Hub.

    Raise WorkshopError (exit code 2) for the path of a missing file.
    """
    if os.path.isfile(os.path.expanduser(dataset)):
        return True
    check_relative_path("--dataset", dataset)
    check_readable(os.path.expanduser(dataset))
    if dataset.endswith(FORMATS) or dataset.startswith((".", "/", "~")):
        folder = os.path.isdir(os.path.expanduser(dataset))
        raise WorkshopError(dataset, "is a folder" if folder else "there is no such file", "correct --dataset")
    return False


def load_from_hub(name: str, part: str) -> Dataset:
    offline_without_network()
    split = {"train": "train", "eval": "validation"}[part]
    with loading_errors("--dataset", name):
        # Without hf://, a folder of this name in the working directory would be read instead
        questions = load_dataset(f"hf://datasets/{name}", split=split).select_columns(
            ["id", "question", "context", "answers"]
        )
    return questions.map(
        lambda example: {"answers": example["answers"]["text"] or [UNANSWERABLE]}, desc=f"Reading {name}"
    )


def read_local(data_args: DataArguments, part: str = "all") -> Iterator[dict]:
    """Yield the questions of --dataset, which is a local file. part: all, train, or held out."""
    return read_questions(data_args.dataset, part, *reading(data_args))


def reading(data_args: DataArguments) -> tuple[str | None, bool, bool]:
    """Return the arguments of `read_file` after the path."""
    return data_args.table_columns, data_args.bad_rows == "skip", data_args.answers == "free"


print_notes = cache(print_once)  # prints lines only once, although both parts of a file have them


def load_from_file(path: str, part: str, data_args: DataArguments) -> Dataset:
    """Return the questions of one part of a local file (read_questions.py).

    The cache key contains a hash of the file, so a changed file is read again.
    """
    columns, skip, free = reading(data_args)
    # Check all questions here, because here an error is one line
    questions, notes, LEFT_OUT[path] = read_file(path, columns, skip, free)
    if not any(choose_part(questions, part)):
        task = task_of(list(questions[0]))
        remedy = f"give --eval_dataset, or a file with at least {HELD_OUT_EVERY} {task.unit}s"
        raise WorkshopError(path, f"no {task.rows.removesuffix('s')} in its {part} {task.unit}s", remedy)
    if notes:
        print_notes("\n".join(notes))
    arguments = {"path": path, "part": part, "columns": columns, "skip": skip, "free": free}
    options = f"{part} {columns} {skip} {UNANSWERABLE} {HELD_OUT_EVERY}"
    key = read_bytes(path, READABLE) + (options + " free" * free).encode()
    with file_system_errors():
        rows = Dataset.from_generator(read_questions, gen_kwargs=arguments, fingerprint=short_hash(key + CODE))
    rows._fingerprint = short_hash(key)  # see tokenise
    return rows


def short_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> Dataset:
    """Return the rows of tokens of examples, see `tokenise_batch`.

    The result is cached. The cache key contains everything that the result depends on.
    """
    task = task_of(dataset.column_names)
    tokenizer.chat_template = tokenizer.chat_template or task.template
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
    unusable = [f"{row['id']}: {row['unusable']}" for row in rows.select_columns(["id", "unusable"]) if row["unusable"]]
    if unusable and data_args.bad_rows != "skip":
        what = f"{len(unusable)} of {len(dataset)} rows cannot be used: {shorten_list(unusable)}"
        raise WorkshopError("--dataset", what, "correct them, or leave them out with BAD_ROWS=skip")
    if unusable:
        print_notes(f"left out: {shorten_list(unusable)}")
        rows = rows.filter(lambda row: not row["unusable"])
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

    The tensors are int64. input_ids, labels, position_ids: (1, tokens). The first token of a question is not a target,
    because the token before it belongs to another question. rows: (questions, longest), the index of each token in the
    row, -1 for padding. places: (tokens), the index of each token in the flattened `rows`.
    """

    padding = "none"
    label_pad_token_id = IGNORED

    def __call__(self, questions: list[dict]) -> dict[str, torch.Tensor]:
        lengths = [len(question["input_ids"]) for question in questions]
        longest = math.ceil(max(lengths) / LENGTH_MULTIPLE) * LENGTH_MULTIPLE
        positions = torch.cat([torch.arange(length) for length in lengths])
        places = torch.cat([number * longest + torch.arange(length) for number, length in enumerate(lengths)])
        rows = torch.full((len(lengths) * longest,), -1)
        rows[places] = torch.arange(len(places))
        return {
            "input_ids": torch.tensor([[token for question in questions for token in question["input_ids"]]]),
            "labels": torch.tensor([[x for question in questions for x in (IGNORED, *question["labels"][1:])]]),
            "position_ids": positions[None],
            "rows": rows.view(-1, longest),
            "places": places,
        }


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
