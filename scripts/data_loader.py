"""SQuAD as one sequence per question: ``Question: ... Context: ... Answer: <answer><EOS>``."""

import hashlib
import json
import os
from collections.abc import Iterator

from datasets import Dataset, load_dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, TrainingArguments

from config import ALL, HUB_SIZES, DataArguments
from distributed.collectives import print_once
from read_questions import FORMATS, HELD_OUT_EVERY, READABLE, UNANSWERABLE, choose_part, read_file, read_questions
from shared.errors import WorkshopError
from shared.hub import check_relative_path, loading_errors, offline_without_network
from shared.json_files import read_bytes

PROMPT = "Question: {question} Context: {context} Answer:"
IGNORED = -100
MAX_ANSWER_TOKENS = 32
# Version of tokenise_batch's output. Increase it when the output changes; otherwise a stale cache is used.
ROWS_VERSION = 5


def load_squad(
    data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, training_args: TrainingArguments
) -> tuple[Dataset, Dataset]:
    """Return the tokenised training set and evaluation set.

    The columns are input_ids, attention_mask, labels, length, prompt_length, cut, id, question, context, answers. The
    seed chooses the questions, so every rank gets the same ones. Raise WorkshopError (exit code 2) if a file is
    unusable or has fewer questions than requested.
    """
    requested = data_args.train_size
    if data_args.samples_per_gpu:
        requested = data_args.samples_per_gpu * training_args.world_size
    train = load_set("train", requested, data_args, tokenizer, training_args)
    if cut := sum(train["cut"][:]):
        print_once(f"{cut} of {len(train)} training questions were cut to --max_length")
    return train, load_evaluation_set(data_args, tokenizer, training_args)


def load_evaluation_set(
    data_args: DataArguments, tokenizer: PreTrainedTokenizerBase, training_args: TrainingArguments
) -> Dataset:
    """Return only the evaluation set of `load_squad`. It does not depend on the training size."""
    return load_set("eval", data_args.eval_size, data_args, tokenizer, training_args)


def load_set(
    part: str,
    requested: int | str | None,
    data_args: DataArguments,
    tokenizer: PreTrainedTokenizerBase,
    training_args: TrainingArguments,
) -> Dataset:
    """Return the requested number of questions of one part (train or eval), tokenised."""
    # One rank of each node reads, tokenises and writes the cache. The other ranks wait, and then read the cache.
    with training_args.main_process_first(local=True, desc="tokenise"):
        questions = read_part(part, data_args)
        name = source(part, data_args)
        size = resolve_size(part, requested, len(questions), name)
        use = {"train": "training", "eval": "evaluation"}[part]
        print_once(f"{use} questions: {size} of {len(questions)} available in {name}")
        seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
        return tokenise(questions.shuffle(seed=seed).select(range(size)), tokenizer, data_args)


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
        return load_from_hub(data_args.dataset, part)
    whole = {"train": "all"} if data_args.eval_dataset else {"train": "train", "eval": "held out"}
    return load_from_file(data_args.dataset, whole[part], data_args)


def is_local(dataset: str) -> bool:
    """Return whether the dataset is a local file, not a name on the Hub.

    Raise WorkshopError (exit code 2) for the path of a missing file.
    """
    if os.path.exists(os.path.expanduser(dataset)):
        return True
    check_relative_path("--dataset", dataset)
    if dataset.endswith(FORMATS) or dataset.startswith((".", "/", "~")):
        raise WorkshopError(dataset, "there is no such file", "correct --dataset")
    return False


def load_from_hub(name: str, part: str) -> Dataset:
    offline_without_network()
    split = {"train": "train", "eval": "validation"}[part]
    with loading_errors("--dataset", name):
        questions = load_dataset(name, split=split).select_columns(["id", "question", "context", "answers"])
    return questions.map(hub_answers, desc=f"Reading {name}")


def hub_answers(example: dict) -> dict:
    return {"answers": example["answers"]["text"] or [UNANSWERABLE]}


def read_local(data_args: DataArguments, part: str = "all") -> Iterator[dict]:
    """Yield the questions of --dataset, which is a local file. part: all, train, or held out."""
    return read_questions(data_args.dataset, part, data_args.table_columns, data_args.bad_rows == "skip")


def load_from_file(path: str, part: str, data_args: DataArguments) -> Dataset:
    """Return the questions of one part of a local file (read_questions.py).

    The cache key contains a hash of the file, so a changed file is read again.
    """
    columns, skip = data_args.table_columns, data_args.bad_rows == "skip"
    content = read_file(path, columns, skip)  # check all questions here, because here an error is one line
    if not any(choose_part(content.questions, part)):
        remedy = f"give --eval_dataset, or a file with at least {HELD_OUT_EVERY} passages"
        raise WorkshopError(path, f"no question in its {part} passages", remedy)
    if content.notes and part != "held out":  # the notes of the whole file, once
        print_once("\n".join(content.notes))
    arguments = {"path": path, "part": part, "columns": columns, "skip": skip}
    key = hashlib.sha256(read_bytes(path, READABLE) + f"{arguments} {UNANSWERABLE} {HELD_OUT_EVERY}".encode())
    with loading_errors("--dataset", path):
        return Dataset.from_generator(read_questions, gen_kwargs=arguments, fingerprint=key.hexdigest()[:16])


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> Dataset:
    """Add the columns input_ids, attention_mask, labels, length, prompt_length and cut.

    The result is cached. The cache key contains everything that the result depends on.
    """
    max_length, labels = data_args.max_length, data_args.labels
    key = (ROWS_VERSION, dataset._fingerprint, tokenizer_key(tokenizer), PROMPT, max_length, labels)
    return dataset.map(
        lambda batch: tokenise_batch(batch, tokenizer, max_length, labels),
        batched=True,
        new_fingerprint=hashlib.sha256(repr(key).encode()).hexdigest()[:16],
        desc="Tokenising",
    )


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{vocabulary} {tokenizer.eos_token_id} {tokenizer.pad_token_id}".encode()).hexdigest()


def tokenise_batch(batch: dict, tokenizer: PreTrainedTokenizerBase, max_length: int, labels: str) -> dict:
    """Return token ids of prompt, first reference answer and EOS, at most `max_length` tokens per question.

    The first `prompt_length` tokens are the prompt, from which generation also starts. `cut` is True if the end of the
    context was cut off. Raise WorkshopError (exit code 2) if a question does not fit even without context.
    """
    rows = []
    texts = [PROMPT.format(question=q, context=c) for q, c in zip(batch["question"], batch["context"], strict=True)]
    encoded = zip(tokenise_beginnings(texts, tokenizer), batch["question"], batch["answers"], strict=True)
    for prompt, question, answers in encoded:
        answer = tokenizer(f" {answers[0].strip()}", add_special_tokens=False)["input_ids"]
        ending = [*answer, tokenizer.eos_token_id]
        room = max_length - max(len(ending), answer_room(max_length))
        cut = len(prompt) > room
        if cut:
            prompt = shorten(prompt, question, room, tokenizer)
        ids = prompt + ending
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "labels": [IGNORED] * len(prompt) + ending if labels == "answer" else ids,
                "length": len(ids),
                "prompt_length": len(prompt),
                "cut": cut,
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def tokenise_beginnings(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of texts that continue after them: without the EOS that some tokenizers append."""
    special = set(tokenizer.all_special_ids)
    rows: list[list[int]] = tokenizer(texts)["input_ids"]
    for row in rows:
        while row and row[-1] in special:
            row.pop()
    return rows


def answer_room(max_length: int) -> int:
    """Return the number of tokens reserved for an answer after each prompt, in training and in generation."""
    return min(MAX_ANSWER_TOKENS, max_length // 4)


def shorten(prompt: list[int], question: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Cut off the end of the context, so that the prompt has at most `limit` tokens. The question stays whole.

    Raise WorkshopError (exit code 2) if the question does not fit even without context.
    """
    beginning, _, ending = PROMPT.partition(" {context}")
    (question_tokens,) = tokenise_beginnings([beginning.format(question=question)], tokenizer)
    answer_tokens = tokenizer(ending, add_special_tokens=False)["input_ids"]
    room = limit - len(answer_tokens)
    if len(question_tokens) > room:
        raise WorkshopError("--max_length", f"leaves no room for the question {question!r:.60}", "raise it")
    kept = prompt[:room]
    # The cut may split a character that has several tokens
    while str(tokenizer.decode(kept)).endswith("\N{REPLACEMENT CHARACTER}"):
        kept.pop()
    return kept + answer_tokens


def collator(tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> DataCollatorForSeq2Seq:
    """Return a collator for batches of shape (micro batch, sequence).

    Padded labels do not count in the loss, except with ``--labels all``.
    """
    return DataCollatorForSeq2Seq(
        tokenizer,
        padding=data_args.padding,
        max_length=data_args.max_length,
        # Tensor cores are most efficient with multiples of 8
        pad_to_multiple_of=8 if data_args.padding == "longest" else None,
        label_pad_token_id=tokenizer.pad_token_id if data_args.labels == "all" else IGNORED,
    )
