"""SQuAD as one sequence per question: ``Question: ... Context: ... Answer: <answer><EOS>``."""

import bisect
import hashlib
import json
import os
import unicodedata
from collections.abc import Iterator
from typing import TypeVar

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from errors import WorkshopError
from hub import cannot_load, offline_without_network
from json_files import parse_json, read_bytes

# The answer to a question that its paragraph cannot answer (SQuAD v2.0)
UNANSWERABLE = "no answer"
HELD_OUT_EVERY = 5
PROMPT = "Question: {question} Context: {context} Answer:"
IGNORED = -100
MAX_ANSWER_TOKENS = 32
FORMAT = "see data/README.md for the format"
ROWS = 2  # what tokenise_batch makes of a question: raised with each change of it, so that no older cache is read
T = TypeVar("T")


def load_squad(data_args, tokenizer: PreTrainedTokenizerBase, training_args) -> tuple[Dataset, Dataset]:
    """Training and evaluation set, tokenised: input_ids, attention_mask, labels, length, cut, id, question,
    context, answers. Subsets are chosen by the seed, and every rank gets the same ones.

    Raises WorkshopError (exit code 2) when a file is unusable or holds fewer questions than asked for.
    """
    train_size = data_args.train_size
    if data_args.samples_per_gpu:
        train_size = data_args.samples_per_gpu * training_args.world_size
    # One rank of each node reads, tokenises and writes the cache, the others wait and then read it.
    with training_args.main_process_first(local=True, desc="tokenise"):
        train, evaluation = read_splits(data_args, tokenizer.name_or_path)
        train = subset(train, train_size, seed_of(training_args), "train", data_args.dataset)
        return tokenise(train, tokenizer, data_args), evaluation_set(evaluation, data_args, tokenizer, training_args)


def load_evaluation_set(data_args, tokenizer: PreTrainedTokenizerBase, training_args) -> Dataset:
    """The evaluation set of `load_squad` alone, whatever the training size is."""
    with training_args.main_process_first(local=True, desc="tokenise"):
        evaluation = read_splits(data_args, tokenizer.name_or_path)[1]
        return evaluation_set(evaluation, data_args, tokenizer, training_args)


def evaluation_set(questions: Dataset, data_args, tokenizer: PreTrainedTokenizerBase, training_args) -> Dataset:
    source = data_args.eval_dataset or data_args.dataset
    chosen = subset(questions, data_args.eval_size, seed_of(training_args), "eval", source)
    return tokenise(chosen, tokenizer, data_args)


def seed_of(training_args) -> int:
    return training_args.data_seed if training_args.data_seed is not None else training_args.seed


def read_splits(data_args, model_name: str = "") -> tuple[Dataset, Dataset]:
    """The questions to train on and those to evaluate on; columns id, question, context, answers."""
    dataset = data_args.dataset
    eval_dataset = data_args.eval_dataset
    if eval_dataset and not is_local(eval_dataset):
        raise WorkshopError("--eval_dataset", f"there is no file {eval_dataset}", "give a SQuAD JSON file")
    if not is_local(dataset):
        splits = load_from_hub(dataset, model_name)
        return splits["train"], from_file(eval_dataset, "all") if eval_dataset else splits["validation"]
    if eval_dataset:
        return from_file(dataset, "all"), from_file(eval_dataset, "all")
    return from_file(dataset, "train"), from_file(dataset, "held out")


def is_local(dataset: str) -> bool:
    # os.path, as pathlib raises for a name that is too long and for a ~user that is unknown
    path = os.path.expanduser(dataset)
    if os.path.isdir(path):
        raise WorkshopError(dataset, "is a folder", "give a SQuAD JSON file, or a Hub name that is no folder here")
    if os.path.exists(path):
        return True
    if dataset.endswith(".json") or dataset.startswith((".", "/", "~")):
        raise WorkshopError(dataset, "there is no such file", "correct --dataset or --eval_dataset")
    return False


def load_from_hub(name: str, model_name: str) -> dict[str, Dataset]:
    offline_without_network()
    columns = ["id", "question", "context", "answers"]
    try:
        splits = load_dataset(name)
        parts = {split: splits[split].select_columns(columns) for split in ("train", "validation")}
    except (OSError, ValueError, KeyError) as error:
        raise cannot_load("--dataset", name, error, model_name, name) from error
    return {split: part.map(hub_answers, desc=f"Reading {name}") for split, part in parts.items()}


def hub_answers(example: dict) -> dict:
    return {"answers": example["answers"]["text"] or [UNANSWERABLE]}


def from_file(path: str, part: str) -> Dataset:
    """Questions of a local SQuAD file. `part`: all, train, or held out (every fifth paragraph).

    They go through a file of the datasets cache, so that memory does not grow with their number.
    """
    path = os.path.realpath(os.path.expanduser(path))
    content = hashlib.sha256(read_squad(path) + f"{part} {UNANSWERABLE} {HELD_OUT_EVERY}".encode())
    if next(read_questions(path, part), None) is None:
        way_out = "give --eval_dataset" if part == "held out" else "give a file with more paragraphs"
        raise WorkshopError(path, f"no question in its {part} paragraphs", way_out)
    arguments = {"path": path, "part": part}
    try:
        return Dataset.from_generator(read_questions, gen_kwargs=arguments, fingerprint=content.hexdigest()[:16])
    except DatasetGenerationError as error:
        if isinstance(error.__cause__, WorkshopError):  # raised by read_questions
            raise error.__cause__ from None
        raise


def read_questions(path: str, part: str = "all") -> Iterator[dict]:
    """Questions of a SQuAD v1.1 or v2.0 JSON file, checked: id, question, context, answers (texts).

    Raises WorkshopError (exit code 2) naming the file and the location of the first fault.
    """
    seen: set[str] = set()
    for number, (location, paragraph) in enumerate(read_paragraphs(path)):
        questions = list(read_paragraph(path, location, paragraph))
        for q, question in enumerate(questions):
            if question["id"] in seen:
                what = f"{question['id']!r:.60} is the id of an earlier question"
                raise WorkshopError(f"{path}: {location}.qas[{q}].id", what, "give each question an id of its own")
            seen.add(question["id"])
        held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if part == "all" or held_out == (part == "held out"):
            yield from questions


def read_paragraph(path: str, location: str, paragraph: dict) -> Iterator[dict]:
    context = required(path, location, paragraph, "context", str)
    for q, item in enumerate(required(path, location, paragraph, "qas", list)):
        where = f"{location}.qas[{q}]"
        question = required(path, where, item, "question", str)
        identifier = required(path, where, item, "id", str)
        answers = required(path, where, item, "answers", list)
        texts = [answer_text(path, f"{where}.answers[{a}]", x, context) for a, x in enumerate(answers)]
        impossible = item.get("is_impossible", False)
        if not isinstance(impossible, bool):
            raise WorkshopError(f"{path}: {where}.is_impossible", f"is {impossible!r:.40}, not true or false", FORMAT)
        if not texts and not impossible:
            raise WorkshopError(f"{path}: {where}.answers", "is empty", "give an answer, or set is_impossible to true")
        answers = texts or [UNANSWERABLE]
        yield {"id": identifier, "question": question.strip(), "context": context, "answers": answers}


def read_squad(path: str) -> bytes:
    return read_bytes(path, "check the path and its permissions")


def read_paragraphs(path: str) -> Iterator[tuple[str, dict]]:
    """Place and content of each paragraph, in the order of the file."""
    raw = read_squad(path)
    if not raw.strip():
        raise WorkshopError(path, "the file is empty", "give a SQuAD JSON file")
    content = parse_json(path, raw, "is the file complete?")
    if not isinstance(content, dict):
        raise WorkshopError(path, "is not a SQuAD file (no object with the key data)", FORMAT)
    for d, article in enumerate(required(path, "", content, "data", list)):
        for p, paragraph in enumerate(required(path, f"data[{d}]", article, "paragraphs", list)):
            yield f"data[{d}].paragraphs[{p}]", paragraph


def required(path: str, location: str, holder: object, key: str, kind: type[T]) -> T:
    """``holder[key]``, which must be of the given kind, and a text not blank."""
    value = holder.get(key) if isinstance(holder, dict) else None
    source = f"{path}: {location}.{key}".replace(": .", ": ")
    blank = isinstance(value, str) and not value.strip()
    if not isinstance(value, kind) or isinstance(value, bool) or blank:
        found = "is missing" if value is None else f"is {value!r:.40}"
        names: dict[type, str] = {str: "a text", list: "a list", int: "a whole number"}
        raise WorkshopError(source, f"{found}, expected {names[kind]}", FORMAT)
    return value


def answer_text(path: str, where: str, answer: object, context: str) -> str:
    text = required(path, where, answer, "text", str)
    start = required(path, where, answer, "answer_start", int)
    if start < 0 or context[start : start + len(text)] != text:
        raise WorkshopError(
            f"{path}: {where}",
            f"{text!r:.40} is not at character {start} of its context",
            "correct answer_start",
        )
    return text


def subset(dataset: Dataset, size: int, seed: int, name: str, source: str) -> Dataset:
    if size > len(dataset):
        flag = {"train": "--train_size or --samples_per_gpu", "eval": "--eval_size"}[name]
        raise WorkshopError(flag, f"{size} questions wanted, but {source} has {len(dataset)} to {name} on", "lower it")
    return dataset.shuffle(seed=seed).select(range(size))


def tokenise(dataset: Dataset, tokenizer: PreTrainedTokenizerBase, data_args) -> Dataset:
    """Add input_ids, attention_mask, labels, length, prompt_length and cut.

    Cached: the key is all that the result depends on.
    """
    settings = {"max_length": data_args.max_length, "labels": data_args.labels}
    key = (ROWS, dataset._fingerprint, tokenizer_key(tokenizer), PROMPT, settings)
    return dataset.map(
        lambda batch: tokenise_batch(batch, tokenizer, **settings),
        batched=True,
        new_fingerprint=hashlib.sha256(repr(key).encode()).hexdigest()[:16],
        desc="Tokenising",
    )


def tokenizer_key(tokenizer: PreTrainedTokenizerBase) -> str:
    vocabulary = json.dumps(sorted(tokenizer.get_vocab().items()))
    return hashlib.sha256(f"{vocabulary} {tokenizer.eos_token_id} {tokenizer.pad_token_id}".encode()).hexdigest()


def tokenise_batch(batch: dict, tokenizer: PreTrainedTokenizerBase, max_length: int, labels: str) -> dict:
    """Lists of token ids: prompt, then the first reference answer, then EOS, at most `max_length` tokens.

    The first `prompt_length` of them are the prompt, which is also what generation starts from. `cut`: whether the
    context lost its end.
    """
    rows: dict = {"input_ids": [], "attention_mask": [], "labels": [], "length": [], "prompt_length": [], "cut": []}
    endings = [answer_ids(answers[0], tokenizer) for answers in batch["answers"]]
    room = [max_length - max(len(ending), answer_room(max_length)) for ending in endings]
    prompts = encode_prompts(batch["question"], batch["context"], room, tokenizer)
    for (prompt, cut), ending in zip(prompts, endings, strict=True):
        ids = prompt + ending
        rows["input_ids"].append(ids)
        rows["attention_mask"].append([1] * len(ids))
        rows["labels"].append([IGNORED] * len(prompt) + ending if labels == "answer" else ids)
        rows["length"].append(len(ids))
        rows["prompt_length"].append(len(prompt))
        rows["cut"].append(cut)
    return rows


def answer_room(max_length: int) -> int:
    """Tokens kept free for an answer behind every prompt, in training and in generation."""
    return min(MAX_ANSWER_TOKENS, max_length // 4)


def answer_ids(answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(f" {answer.strip()}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def questions_cut(train: Dataset, evaluation: Dataset) -> dict[str, int]:
    """How many questions of each set have lost the end of their context to --max_length."""
    return {"train": sum(train["cut"][:]), "eval": sum(evaluation["cut"][:])}


def encode_prompts(
    questions: list[str], contexts: list[str], room: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[tuple[list[int], bool]]:
    """Token ids of each prompt, at most `room` of them, and whether its context had to lose its end for that.

    Raises WorkshopError (exit code 2) when a question does not fit even without any context.
    """
    texts = [PROMPT.format(question=q, context=c) for q, c in zip(questions, contexts, strict=True)]
    encoded = tokenizer(texts)["input_ids"]
    return [
        (ids, False) if len(ids) <= limit else (shorten(question, context, limit, tokenizer), True)
        for ids, question, context, limit in zip(encoded, questions, contexts, room, strict=True)
    ]


def shorten(question: str, context: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """The prompt with as much of the context's beginning as fits into `limit` tokens.

    Cut at the end of a token, and encoded anew: what stands behind the cut decides how the last word is split.
    """

    def encode(end: int) -> list[int]:
        return tokenizer(PROMPT.format(question=question, context=context[:end].rstrip()))["input_ids"]

    ends = token_ends(question, context, tokenizer)
    fitting = bisect.bisect_right(ends, limit, key=lambda end: len(encode(end)))
    if not fitting:
        raise WorkshopError("--max_length", f"leaves no room for the question {question!r:.60}", "raise it")
    return encode(ends[fitting - 1])


def token_ends(question: str, context: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Where the context can be cut, as numbers of its characters: behind nothing, and behind each token.

    Several tokens can make one character, and several characters what a reader takes for one.
    """
    before = len(PROMPT.partition("{context}")[0].format(question=question))
    if tokenizer.is_fast:
        text = PROMPT.format(question=question, context=context)
        offsets = tokenizer(text, return_offsets_mapping=True)["offset_mapping"]
        ends = {end - before for _, end in offsets if before < end < before + len(context)}
    else:  # it does not tell where its tokens lie
        ends = set(range(1, len(context)))
    return [0, *sorted(end for end in ends if starts_character(context, end))]


def starts_character(text: str, place: int) -> bool:
    """Whether no accent, variation selector or joined emoji goes on here."""
    joined = "\u200d" in text[place - 1 : place + 1]
    return not joined and not unicodedata.category(text[place]).startswith("M")


def collator(tokenizer: PreTrainedTokenizerBase, data_args) -> DataCollatorForSeq2Seq:
    """Batches of shape (micro batch, sequence); padded labels do not count, except under ``--labels all``."""
    return DataCollatorForSeq2Seq(
        tokenizer,
        padding=data_args.padding,
        max_length=data_args.max_length,
        # tensor cores work on multiples of 8
        pad_to_multiple_of=8 if data_args.padding == "longest" else None,
        label_pad_token_id=tokenizer.pad_token_id if data_args.labels == "all" else IGNORED,
    )
