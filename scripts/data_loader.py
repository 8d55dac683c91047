"""SQuAD as one sequence per question: ``Question: ... Context: ... Answer: <answer><EOS>``."""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypeVar

from datasets import Dataset, load_dataset
from datasets.exceptions import DatasetGenerationError
from transformers import DataCollatorForSeq2Seq, PreTrainedTokenizerBase

from errors import WorkshopError
from hub import cannot_load, offline_without_network

# The answer to a question that its paragraph cannot answer (SQuAD v2.0)
UNANSWERABLE = "no answer"
HELD_OUT_EVERY = 5
PROMPT = "Question: {question} Context: {context} Answer:"
IGNORED = -100
MAX_ANSWER_TOKENS = 32
T = TypeVar("T")


def load_squad(data_args, tokenizer: PreTrainedTokenizerBase, training_args) -> tuple[Dataset, Dataset]:
    """Training and evaluation set, tokenised: input_ids, attention_mask, labels, length, id, question,
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
    looks_like_a_path = dataset.endswith(".json") or dataset.startswith((".", "/", "~"))
    path = Path(dataset).expanduser()
    if path.is_dir():
        raise WorkshopError(dataset, "is a folder", "give a SQuAD JSON file, or a Hub name that is no folder here")
    if looks_like_a_path and not path.is_file():
        raise WorkshopError(dataset, "there is no such file", "correct --dataset or --eval_dataset")
    return path.is_file()


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
    path = str(Path(path).expanduser().resolve())
    content = hashlib.sha256(read_bytes(path) + f"{part} {UNANSWERABLE} {HELD_OUT_EVERY}".encode())
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
    for number, (location, paragraph) in enumerate(read_paragraphs(path)):
        questions = list(read_paragraph(path, location, paragraph))
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
        if not texts and not item.get("is_impossible"):
            raise WorkshopError(f"{path}: {where}.answers", "is empty", "give an answer, or set is_impossible to true")
        answers = texts or [UNANSWERABLE]
        yield {"id": identifier, "question": question.strip(), "context": context, "answers": answers}


def read_bytes(path: str) -> bytes:
    try:
        return Path(path).expanduser().read_bytes()
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", "check the path and its permissions") from error


def read_paragraphs(path: str) -> Iterator[tuple[str, dict]]:
    """Place and content of each paragraph, in the order of the file."""
    raw = read_bytes(path)
    if not raw.strip():
        raise WorkshopError(path, "the file is empty", "give a SQuAD JSON file")
    try:
        content = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError as error:
        raise WorkshopError(path, f"byte {error.start} is not UTF-8", "convert the file with iconv -t UTF-8") from error
    except json.JSONDecodeError as error:
        raise WorkshopError(
            path, f"line {error.lineno}, column {error.colno}: {error.msg}", "is the file complete?"
        ) from error
    if not isinstance(content, dict):
        raise WorkshopError(
            path, "is not a SQuAD file (no object with the key data)", "see data/README.md for the format"
        )
    for d, article in enumerate(required(path, "", content, "data", list)):
        for p, paragraph in enumerate(required(path, f"data[{d}]", article, "paragraphs", list)):
            yield f"data[{d}].paragraphs[{p}]", paragraph


def required(path: str, location: str, holder: object, key: str, kind: type[T]) -> T:
    """``holder[key]``, which must be of the given kind and not a blank text."""
    value = holder.get(key) if isinstance(holder, dict) else None
    blank = isinstance(value, str) and not value.strip()
    if not isinstance(value, kind) or isinstance(value, bool) or blank:
        found = "is missing" if value is None else f"is {value!r:.40}"
        names: dict[type, str] = {str: "a text", list: "a list", int: "a whole number"}
        source = f"{path}: {location}.{key}".replace(": .", ": ")
        raise WorkshopError(source, f"{found}, expected {names[kind]}", "see data/README.md for the format")
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
    """Add input_ids, attention_mask, labels and length. Cached: the key is all that the result depends on."""
    settings = {"max_length": data_args.max_length, "labels": data_args.labels}
    key = (dataset._fingerprint, tokenizer_key(tokenizer), PROMPT, settings)
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

    The first `prompt_length` of them are the prompt, which is also what generation starts from.
    """
    rows: dict = {"input_ids": [], "attention_mask": [], "labels": [], "length": [], "prompt_length": []}
    endings = [answer_ids(answers[0], tokenizer) for answers in batch["answers"]]
    room = [max_length - max(len(ending), answer_room(max_length)) for ending in endings]
    prompts = encode_prompts(batch["question"], batch["context"], room, tokenizer)
    for prompt, ending in zip(prompts, endings, strict=True):
        ids = prompt + ending
        rows["input_ids"].append(ids)
        rows["attention_mask"].append([1] * len(ids))
        rows["labels"].append([IGNORED] * len(prompt) + ending if labels == "answer" else ids)
        rows["length"].append(len(ids))
        rows["prompt_length"].append(len(prompt))
    return rows


def answer_room(max_length: int) -> int:
    """Tokens kept free for an answer behind every prompt, in training and in generation."""
    return min(MAX_ANSWER_TOKENS, max_length // 4)


def answer_ids(answer: str, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    return tokenizer(f" {answer.strip()}", add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]


def encode_prompts(
    questions: list[str], contexts: list[str], room: list[int], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids of each prompt, at most `room` of them: a prompt that is too long loses the end of its context.

    Raises WorkshopError (exit code 2) when a question does not fit even without any context.
    """
    texts = [PROMPT.format(question=q, context=c) for q, c in zip(questions, contexts, strict=True)]
    encoded = tokenizer(texts)["input_ids"]
    return [
        ids if len(ids) <= limit else shorten(question, context, limit, tokenizer)
        for ids, question, context, limit in zip(encoded, questions, contexts, room, strict=True)
    ]


def shorten(question: str, context: str, limit: int, tokenizer: PreTrainedTokenizerBase) -> list[int]:
    """Cut words off the context's end until the prompt has at most `limit` tokens."""
    words = context.split(" ")
    fewest = 0
    most = len(words)  # the number of words that fit lies in [fewest, most)
    best = None
    while fewest < most:
        middle = (fewest + most) // 2
        ids = tokenizer(PROMPT.format(question=question, context=" ".join(words[:middle])))["input_ids"]
        if len(ids) <= limit:
            best = ids
            fewest = middle + 1
        else:
            most = middle
    if best is None:
        raise WorkshopError("--max_length", f"leaves no room for the question {question!r:.60}", "raise it")
    return best


def collator(tokenizer: PreTrainedTokenizerBase, data_args) -> DataCollatorForSeq2Seq:
    """Batches of shape (micro batch, sequence); padded labels do not count, except under ``--labels all``."""
    return DataCollatorForSeq2Seq(
        tokenizer,
        padding=data_args.padding,
        max_length=data_args.max_length,
        label_pad_token_id=tokenizer.pad_token_id if data_args.labels == "all" else IGNORED,
    )
