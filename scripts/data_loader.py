"""SQuAD as one sequence per question: ``Question: ... Context: ... Answer: <answer><EOS>``."""

import hashlib
import json
import math
import os
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, fingerprint, load_dataset
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase, TrainingArguments

from config import ALL, HUB_SIZES, IGNORED, DataArguments
from distributed.collectives import print_once
from read_questions import FORMATS, HELD_OUT_EVERY, READABLE, UNANSWERABLE, choose_part, read_file, read_questions
from shared.errors import WorkshopError
from shared.files import check_readable
from shared.hub import check_relative_path, file_system_errors, loading_errors, offline_without_network
from shared.json_files import read_bytes

PROMPT = "Question: {question} Context: {context} Answer:"
BEFORE_CONTEXT, _, AFTER_CONTEXT = PROMPT.partition(" {context}")
ANCHOR = AFTER_CONTEXT.strip()  # a text before an answer
MAX_ANSWER_TOKENS = 32
LENGTH_MULTIPLE = 8  # tensor cores are most efficient with multiples of 8
ROW_MAKERS = ("data_loader.py", "read_questions.py", "shared/json_files.py")
# The code that makes rows. It belongs to the keys of the caches, so that a change of the code has an effect
CODE = b"".join(Path(__file__).parent.joinpath(name).read_bytes() for name in ROW_MAKERS)
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
        trained = set(train["context"][:])
        if shared := sum(context in trained for context in evaluation["context"]):
            print_once(f"{shared} of {len(evaluation)} evaluation questions are about a passage of the training set")
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
        print_once(f"{use} questions: {size} of {len(questions)} available in {name}")
        seed = training_args.seed if training_args.data_seed is None else training_args.data_seed
        with file_system_errors():
            rows = tokenise(questions.shuffle(seed=seed).select(range(size)), tokenizer, data_args)
    if cut := sum(rows["cut"][:]):
        print_once(
            f"{cut} of {size} {use} questions were cut to --max_length; {sum(rows['answer_cut'])} lost their answer"
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
    return read_questions(data_args.dataset, part, data_args.table_columns, data_args.bad_rows == "skip")


print_notes = cache(print_once)  # prints lines only once, although both parts of a file have them


def load_from_file(path: str, part: str, data_args: DataArguments) -> Dataset:
    """Return the questions of one part of a local file (read_questions.py).

    The cache key contains a hash of the file, so a changed file is read again.
    """
    columns, skip = data_args.table_columns, data_args.bad_rows == "skip"
    # Check all questions here, because here an error is one line
    questions, notes, LEFT_OUT[path] = read_file(path, columns, skip)
    if not any(choose_part(questions, part)):
        remedy = f"give --eval_dataset, or a file with at least {HELD_OUT_EVERY} passages"
        raise WorkshopError(path, f"no question in its {part} passages", remedy)
    if notes:
        print_notes("\n".join(notes))
    arguments = {"path": path, "part": part, "columns": columns, "skip": skip}
    options = f"{part} {columns} {skip} {UNANSWERABLE} {HELD_OUT_EVERY}"
    key = read_bytes(path, READABLE) + options.encode()
    with file_system_errors():
        rows = Dataset.from_generator(read_questions, gen_kwargs=arguments, fingerprint=short_hash(key + CODE))
    rows._fingerprint = short_hash(key)  # see tokenise
    return rows


def short_hash(key: bytes) -> str:
    return hashlib.sha256(key).hexdigest()[:16]


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data_args: DataArguments) -> Dataset:
    """Add the columns of `tokenise_batch`.

    The result is cached. The cache key contains everything that the result depends on.
    """
    max_length, labels = data_args.max_length, data_args.labels
    # Checkpoints of 2.0.0 contain a hash with version 6. It had other tokens with rules such as Llama-2's
    version = 6 if tokenise_answers(["a"], tokenizer) == tokenise_texts([" a"], tokenizer) else 7
    key = repr((version, dataset._fingerprint, tokenizer_key(tokenizer), PROMPT, max_length, labels)).encode()
    rows = dataset.map(
        lambda batch: tokenise_batch(batch, tokenizer, max_length, labels),
        batched=True,
        new_fingerprint=short_hash(key + CODE),
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
    """Return token ids of prompt, first reference answer and EOS, at most `max_length` tokens per question.

    The columns are input_ids, attention_mask, labels, length, prompt_length, cut, answer_cut. The first `prompt_length`
    tokens are the prompt. `cut` is True if the end of the context was cut off, and `answer_cut` if the rest of the
    context no longer contains the answer. Raise WorkshopError (exit code 2) if a question does not fit even without
    context.
    """
    rows = []
    leading = leading_tokens(tokenizer)
    texts = [PROMPT.format(question=q, context=c) for q, c in zip(batch["question"], batch["context"], strict=True)]
    firsts = [answers[0] for answers in batch["answers"]]
    encoded = zip(tokenise_texts(texts, tokenizer), tokenise_answers(firsts, tokenizer), strict=True)
    for i, (tokens, answer) in enumerate(encoded):
        prompt = leading + tokens
        ending = [*answer, tokenizer.eos_token_id]
        room = max_length - max(len(ending), answer_room(max_length))
        cut = len(prompt) > room
        prompt, kept = shorten(prompt, batch["question"][i], room, tokenizer)
        ids = prompt + ending
        in_context = firsts[i] in batch["context"][i]
        rows.append(
            {
                "input_ids": ids,
                "attention_mask": [1] * len(ids),
                "labels": [IGNORED] * len(prompt) + ending if labels == "answer" else ids,
                "length": len(ids),
                "prompt_length": len(prompt),
                "cut": cut,
                # Both texts are decoded, because some tokenizers change a text
                "answer_cut": cut and in_context and decode(answer, tokenizer) not in decode(kept, tokenizer),
            }
        )
    return {name: [row[name] for row in rows] for name in rows[0]}


def tokenise_texts(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of texts, without control tokens: the text `</s>` never becomes the EOS token."""
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # The vocabulary of some tokenizers (Unigram, WordLevel) contains the text of a control token. Spell it out there
    control = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}
    for row in rows:
        for token in control.intersection(row):
            characters: Any = tokenizer.convert_tokens_to_ids(list(str(tokenizer.convert_ids_to_tokens(token))))
            row[:] = [each for known in row for each in (characters if known == token else [known])]
    return rows


def decode(tokens: Any, tokenizer: PreTrainedTokenizerBase) -> str:
    """Return the text of tokens, without control tokens such as EOS and padding."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()


def tokenise_answers(answers: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of answers as they follow a prompt, without EOS."""
    return tokenise_continuations([f" {answer.strip()}" for answer in answers], tokenizer)


def tokenise_continuations(texts: list[str], tokenizer: PreTrainedTokenizerBase) -> list[list[int]]:
    """Return the tokens of texts as they follow another text.

    The rules of some tokenizers, such as Llama-2's, put a blank before a text. Each of these texts already begins with
    one, so the first token of a text that is tokenised by itself would be a lone blank.
    """
    (before, *rows) = tokenise_texts([ANCHOR, *(ANCHOR + text for text in texts)], tokenizer)
    alone = tokenise_texts(texts, tokenizer)  # for tokenizers that join the anchor with the text
    return [row[len(before) :] if row[: len(before)] == before else own for row, own in zip(rows, alone, strict=True)]


def leading_tokens(tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Return the control tokens that the tokenizer puts before each text, such as Llama's ``<s>``."""
    example = tokenizer("a", return_special_tokens_mask=True)
    return example["input_ids"][: example["special_tokens_mask"].index(0)]


def answer_room(max_length: int) -> int:
    """Return the number of tokens reserved for an answer after each prompt of the training."""
    return min(MAX_ANSWER_TOKENS, max_length // 4)


def answer_limit(questions: Dataset, tokenizer: PreTrainedTokenizerBase, max_length: int) -> int:
    """Return the number of tokens that a generated answer may have: the longest reference answer and EOS fit.

    It is at least `answer_room`, and leaves enough of `max_length` for the longest question.
    """
    answers = (tokens for texts in questions["answers"] for tokens in tokenise_answers(texts, tokenizer))
    longest_answer = max(map(len, answers)) + 1
    longest_question = max(sum(map(len, frame_context(question, tokenizer))) for question in questions["question"])
    return max(answer_room(max_length), min(longest_answer, max_length - longest_question))


def frame_context(question: str, tokenizer: PreTrainedTokenizerBase) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt before its context, and those after it."""
    (before,) = tokenise_texts([BEFORE_CONTEXT.format(question=question)], tokenizer)
    return leading_tokens(tokenizer) + before, tokenise_continuations([AFTER_CONTEXT], tokenizer)[0]


def shorten(
    prompt: list[int], question: str, limit: int, tokenizer: PreTrainedTokenizerBase
) -> tuple[list[int], list[int]]:
    """Cut off the end of the context, so that the prompt has at most `limit` tokens. The question stays whole.

    Return the prompt, and the tokens of the context that it keeps (none if the whole prompt fits). Raise WorkshopError
    (exit code 2) if the question does not fit even without context.
    """
    if len(prompt) <= limit:
        return prompt, []
    before, after = frame_context(question, tokenizer)
    room = limit - len(after)
    if len(before) > room:
        raise WorkshopError("--max_length", f"leaves no room for the question {question!r:.60}", "raise it")
    kept = prompt[:room]
    # The cut may split a character that has several tokens
    while str(tokenizer.decode(kept)).endswith("\N{REPLACEMENT CHARACTER}"):
        kept.pop()
    return kept + after, kept[len(before) :]


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
