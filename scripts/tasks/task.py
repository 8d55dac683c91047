"""One object for each kind of training data. Each file of this folder has one kind, and tasks/__init__.py lists them.

    file -> cells of a row -> example -> rows of tokens -> batches
            read_questions    Task.read  Task.encode       data_loader

An example is a dict with the columns id, question (SHOW prints it), answers (references for EM and F1, perhaps none),
and those of its kind. Its values are texts, numbers, and lists of them. A row of tokens has the columns of
`token_row` and of its example. The trainer, the collators, the checkpoints and the estimates see only tokens.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from config import IGNORED

IDS = ("id", "qid", "question_id")


class RowError(Exception):
    """The reason why a row cannot be used."""


class Columns(NamedTuple):
    """Names of the columns of a file that a kind reads. The kind decides what each place means.

    free: the answer about a passage need not be a part of it. squad: the file is a SQuAD file, which lists all answers
    of a question with it. In a table, a repeated question has another answer.
    """

    first: str
    second: str = ""
    others: tuple[str, ...] = ()
    free: bool = False
    squad: bool = False


@dataclass(frozen=True)
class Task:
    """A kind of data. It has no state of its file: the columns of an example say its kind.

    name, columns: for the log and errors. rows: a plural noun for its rows in the log. unit: what is held out as a
    whole. column: a column that examples of no other kind have. labels, em_f1: defaults of LABELS and EM_F1.
    pieces: True for documents: they have no answers, and each becomes several rows, so that sizes count rows of tokens.
    template: the chat template for a tokenizer that has none; it is saved with the model.
    ends(tokenizer): the tokens at which a generated answer ends.

    choose(names, cells): return the columns to read, None if a file with these names has another kind. cells: the first
    row. read(cells, columns, place): return the example of a row, or raise RowError with the reason if the row cannot
    be used. encode(example, tokenizer, max_length, labels): return its rows of tokens, at least one, or raise RowError.
    With labels "answer" only the tokens that the model has to write itself count, otherwise all.

    ask(question, context): return the example of a question that has no answer yet; context is "" if there is none.
    prompt(example, room, tokenizer): return at most `room` tokens after which the model has to answer. The example may
    come from a file or from `ask`. A row of tokens begins with the prompt for the same room. least_prompt(example,
    tokenizer, max_length): the number of tokens of a prompt that must not be cut off. texts(example): the texts from
    which the tokenizer of tiny-bloom learns. group(example): the text that stands for its unit. key(example): what rows
    of a table have in common if they are one example with several answers; None if each row is an example.
    """

    name: str
    columns: str
    rows: str
    column: str
    choose: Callable[[list[str], dict[str, Any]], Columns | None]
    read: Callable[[dict[str, Any], Columns, str], dict]
    encode: Callable[[dict, Any, int, str], list[dict]]
    ask: Callable[[str, str], dict]
    prompt: Callable[[dict, int, Any], list[int]]
    texts: Callable[[dict], list[str]]
    unit: str = "row"
    labels: Literal["sequence", "answer"] = "answer"
    em_f1: bool = False
    pieces: bool = False
    template: str | None = None
    ends: Callable[[Any], int | list[int]] = lambda tokenizer: tokenizer.eos_token_id
    least_prompt: Callable[[dict, Any, int], int] = lambda example, tokenizer, max_length: max_length // 2
    group: Callable[[dict], str] | None = None
    key: Callable[[dict], Any] | None = None

    def unit_of(self, example: dict) -> str:
        """Return the text of the unit that an example belongs to: all its texts, if its kind has no larger units."""
        return self.group(example) if self.group else repr(self.texts(example))


def token_row(
    ids: list[int],
    counted: list[bool],
    prompt_length: int,
    cut: bool = False,
    answer_cut: bool = False,
    unusable: str = "",
) -> dict:
    """Return the columns of a row of tokens.

    counted: which tokens count in the loss. prompt_length: the number of tokens of the prompt, after which generation
    begins. cut: tokens were cut off. answer_cut: so the rest does not contain the answer, or not all of it. unusable:
    the reason why an example has no row of tokens; the other values are then empty.
    """
    return {
        "input_ids": ids,
        "attention_mask": [1] * len(ids),
        "labels": [token if counts else IGNORED for token, counts in zip(ids, counted, strict=True)],
        "length": len(ids),
        "prompt_length": prompt_length,
        "cut": cut,
        "answer_cut": answer_cut,
        "unusable": unusable,
    }


# Cells


def usual(names: list[str], words: tuple[str, ...]) -> str | None:
    """Return the name that is among the words; the most usual word comes first."""
    return next((name for word in words for name in names if name.lower() == word), None)


def identifier(cells: dict[str, Any], place: str) -> str:
    return next((str(cells[name]) for name in IDS if cells.get(name)), place)


def read_text(cells: dict[str, Any], column: str) -> str:
    value = cells.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{column} is {'empty' if column in cells else 'missing'}")
    if not isinstance(value, str):
        raise RowError(f"{column} is not a text: {value!r:.40}")
    return value


# Tokens


def tokenise_texts(texts: list[str], tokenizer: Any) -> list[list[int]]:
    """Return the tokens of texts, without control tokens: the text `</s>` never becomes the EOS token."""
    rows: list[list[int]] = tokenizer(texts, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    # The vocabulary of some tokenizers (Unigram, WordLevel) contains the text of a control token. Spell it out there
    control = {*tokenizer.all_special_ids} - {tokenizer.unk_token_id} | {tokenizer.eos_token_id}
    for row in rows:
        for token in control.intersection(row):
            characters: Any = tokenizer.convert_tokens_to_ids(list(str(tokenizer.convert_ids_to_tokens(token))))
            row[:] = [each for known in row for each in (characters if known == token else [known])]
    return rows


def leading_tokens(tokenizer: Any) -> list[int]:
    """Return the control tokens that the tokenizer puts before each text, such as Llama's ``<s>``."""
    example = tokenizer("a", return_special_tokens_mask=True)
    return example["input_ids"][: example["special_tokens_mask"].index(0)]


def common_length(one: Sequence, other: Sequence) -> int:
    """Return the number of elements that both begin with."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def keep_end(tokens: list[int], room: int, tokenizer: Any) -> list[int]:
    """Return the last tokens of a prompt, after the control tokens that the tokenizer puts before each text."""
    leading = leading_tokens(tokenizer)
    return leading + tokens[max(0, len(leading) + len(tokens) - room) :]


def decode(tokens: Any, tokenizer: Any) -> str:
    """Return the text of tokens, without control tokens such as EOS and padding."""
    return str(tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)).strip()
