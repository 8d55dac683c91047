"""A passage, a question about it, and its answers, as one sequence: ``Question: ... Context: ... Answer: ...<EOS>``.

    context,question,answer
    "The mill is old. It was built in 1821.",When was the mill built?,in 1821

For several answers, write a JSON list into the cell, name several columns, or repeat the row with another answer. An
answer `[]`, or `true` in a column is_impossible, means that the passage does not answer the question. Each answer is a
part of the passage, except with ANSWERS=free.
"""

import contextlib
import json
from typing import Any

from shared.errors import WorkshopError
from tasks.task import (
    Columns,
    RowError,
    Task,
    decode,
    identifier,
    leading_tokens,
    read_text,
    token_row,
    tokenise_texts,
    usual,
)

PROMPT = "Question: {question} Context: {context} Answer:"
BEFORE_CONTEXT, _, AFTER_CONTEXT = PROMPT.partition(" {context}")
ANCHOR = AFTER_CONTEXT.strip()  # a text before an answer
MAX_ANSWER_TOKENS = 32
# The reference answer if the passage does not answer the question (SQuAD v2.0)
UNANSWERABLE = "no answer"
# Usual names of the columns, the most usual first
USUAL_NAMES = {
    "context": ("context", "passage", "paragraph", "text", "document", "article", "source"),
    "question": ("question", "query", "prompt", "instruction", "input"),
    "answer": ("answers", "answer", "response", "label", "output", "target", "completion"),
}
NOT_IN_PASSAGE = "the passage does not contain the answer"
IMPOSSIBLE = "is_impossible"
TRUTH = {"true": True, "1": True, "false": False, "0": False, "": None}  # cells of a column is_impossible
SQUAD = Columns("context", "question", ("answers",), squad=True)


# 1. From a row to an example


def choose(names: list[str], cells: dict[str, Any]) -> Columns | None:
    context, question, answer = (usual(names, words) for words in USUAL_NAMES.values())
    return Columns(context, question, (answer,)) if context and question and answer else None


def read(cells: dict[str, Any], chosen: Columns, place: str) -> dict:
    context = read_text(cells, chosen.first)
    question = read_text(cells, chosen.second).strip()
    in_columns = [read_answers(cells.get(column), context, chosen.free) for column in chosen.others]
    answers = [answer for column in in_columns for answer in column or []]
    impossible = cells.get(IMPOSSIBLE)
    if not isinstance(impossible, bool | None):
        raise RowError(f"is_impossible is {impossible!r:.40}, expected true or false")
    if impossible and answers:
        raise RowError("is_impossible is true, but there is an answer")
    says_so = impossible or (impossible is None and any(column == [] for column in in_columns))
    if not answers and not says_so:
        raise RowError("the answer is empty (if the passage does not answer the question, write [] or is_impossible)")
    return {
        "id": identifier(cells, place),
        "question": question,
        "context": context,
        "answers": answers or [UNANSWERABLE],
    }


def read_answers(value: Any, context: str, free: bool) -> list[str] | None:
    """Return the answers in a cell, each of them a part of the context unless `free`. None for an empty cell.

    value: a text, a list, a list as JSON text, or a dict with lists, as datasets of the Hub have it.
    """
    if isinstance(value, str) and value.strip() == "[]":
        return []  # even if the context contains these two characters
    if isinstance(value, str) and value.strip() not in context and value.strip()[:1] in ("[", "{"):
        with contextlib.suppress(ValueError, RecursionError):
            value = json.loads(value)
    if value is None or (isinstance(value, str) and not value.strip()):
        return None
    if isinstance(value, dict):
        texts = value.get("text")
        if not isinstance(texts, list):
            raise RowError(f"the answer is not a text: {value!r:.40}")
        starts = value.get("answer_start") or [None] * len(texts)
        if not isinstance(starts, list) or len(starts) != len(texts):
            raise RowError(f"answer_start is {starts!r:.40}, expected a list with a number for each answer")
        value = [{"text": text, "answer_start": start} for text, start in zip(texts, starts, strict=True)]
    return [read_answer(each, context, free) for each in (value if isinstance(value, list) else [value])]


def read_answer(value: Any, context: str, free: bool) -> str:
    """Return the text of an answer. value: a text, a whole number, or SQuAD's dict with text and answer_start."""
    text, start = (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (value, None)
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str) or not text.strip():
        raise RowError(f"an answer is not a text: {text!r:.40}")
    if start is None:
        text = text.strip()
        if text not in context and not free:
            other = context.lower().find(text.lower())
            near = f", only {context[other : other + len(text)]!r:.60}" if other >= 0 else ""
            raise RowError(f"{NOT_IN_PASSAGE} {text!r:.60}{near}")
    elif not isinstance(start, int) or start < 0 or not context.startswith(text, start):
        raise RowError(f"the answer {text!r:.40} is not at answer_start {start!r:.40}, which counts characters from 0")
    return text


# 2. From an example to tokens


def encode(example: dict, tokenizer: Any, max_length: int, labels: str) -> list[dict]:
    """Return the tokens of prompt, first reference answer and EOS, at most `max_length`.

    The end of a context that is too long is cut off. Raise WorkshopError (exit code 2) if the question does not fit
    even without context.
    """
    first = example["answers"][0]
    (answer,) = tokenise_answers([first], tokenizer)
    ending = [*answer, tokenizer.eos_token_id]
    room = max_length - max(len(ending), answer_room(max_length))
    whole = whole_prompt(example, tokenizer)
    prompt, kept = shorten(whole, example["question"], room, tokenizer)
    cut = len(whole) > room
    # Both texts are decoded, because some tokenizers change a text
    lost = cut and first in example["context"] and decode(answer, tokenizer) not in decode(kept, tokenizer)
    counted = [labels != "answer"] * len(prompt) + [True] * len(ending)
    return [token_row(prompt + ending, counted, len(prompt), cut, lost)]


def whole_prompt(example: dict, tokenizer: Any) -> list[int]:
    text = PROMPT.format(question=example["question"], context=example["context"])
    return leading_tokens(tokenizer) + tokenise_texts([text], tokenizer)[0]


def prompt(example: dict, room: int, tokenizer: Any) -> list[int]:
    return shorten(whole_prompt(example, tokenizer), example["question"], room, tokenizer)[0]


def tokenise_answers(answers: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of answers as they follow a prompt, without EOS."""
    return tokenise_continuations([f" {answer.strip()}" for answer in answers], tokenizer)


def tokenise_continuations(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of texts as they follow another text.

    The rules of some tokenizers, such as Llama-2's, put a blank before a text. Each of these texts already begins with
    one, so the first token of a text that is tokenised by itself would be a lone blank.
    """
    (before, *rows) = tokenise_texts([ANCHOR, *(ANCHOR + text for text in texts)], tokenizer)
    alone = tokenise_texts(texts, tokenizer)  # for tokenizers that join the anchor with the text
    return [row[len(before) :] if row[: len(before)] == before else own for row, own in zip(rows, alone, strict=True)]


def answer_room(max_length: int) -> int:
    """Return the number of tokens reserved for an answer after each prompt of the training."""
    return min(MAX_ANSWER_TOKENS, max_length // 4)


def frame_context(question: str, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of a prompt before its context, and those after it."""
    (before,) = tokenise_texts([BEFORE_CONTEXT.format(question=question)], tokenizer)
    return leading_tokens(tokenizer) + before, tokenise_continuations([AFTER_CONTEXT], tokenizer)[0]


def shorten(prompt: list[int], question: str, limit: int, tokenizer: Any) -> tuple[list[int], list[int]]:
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


PASSAGE = Task(
    name="passage",
    columns="context, question, answer",
    rows="questions",
    unit="passage",
    column="context",
    labels="sequence",
    em_f1=True,
    choose=choose,
    read=read,
    encode=encode,
    ask=lambda question, context: {"question": question, "context": context},
    prompt=prompt,
    least_prompt=lambda example, tokenizer, max_length: sum(map(len, frame_context(example["question"], tokenizer))),
    texts=lambda example: [example["context"], example["question"]],
    group=lambda example: example["context"],
    key=lambda example: (example["context"], example["question"]),
)
