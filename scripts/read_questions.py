"""Read questions from a file: SQuAD, or a table as CSV, TSV, JSON Lines or a JSON list of objects.

Each row of a table has a passage, a question about it, and an answer that is a part of the passage:

    context,question,answer
    "The mill is old. It was built in 1821.",When was the mill built?,in 1821

For several answers, write a JSON list into the cell, name several columns, or repeat the row with another answer. An
answer `[]`, or `true` in a column is_impossible, means that the passage does not answer the question.

Each row is used, is empty, or cannot be used for a reason. The reasons are listed, and no row is lost without one.
"""

import contextlib
import csv
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import HALF_CHARACTER, WorkshopError, did_you_mean
from shared.json_files import decode, is_json_lines, parse_json, read_bytes

# The reference answer if the passage does not answer the question (SQuAD v2.0)
UNANSWERABLE = "no answer"
HELD_OUT_EVERY = 5
READABLE = "check the path and its permissions"
# Usual names of the columns, the most usual first
USUAL_NAMES = {
    "context": ("context", "passage", "paragraph", "text", "document", "article", "source"),
    "question": ("question", "query", "prompt", "instruction", "input"),
    "answer": ("answers", "answer", "response", "label", "output", "target", "completion"),
}
IDS = ("id", "qid", "question_id")
SHOWN = 10  # rows at most, in a list of rows that cannot be used
FORMATS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv")
IMPOSSIBLE = "is_impossible"
TRUTH = {"true": True, "1": True, "false": False, "0": False, "": None}  # cells of a column is_impossible


class Columns(NamedTuple):
    context: str
    question: str
    answers: list[str]


SQUAD = Columns("context", "question", ["answers"])


class RowError(Exception):
    """The reason why a row cannot be used."""


class Row(NamedTuple):
    """A row of a table, or a question of a SQuAD file.

    place: where it is in the file. cells: a value for each column; None for an empty row; a RowError if the row cannot
    be read.
    """

    place: str
    cells: Any


def read_questions(path: str, part: str = "all", columns: str | None = None, skip: bool = False) -> Iterator[dict]:
    """Yield the questions of one part of a file, see `choose_part`. For the other arguments, see `read_file`."""
    yield from choose_part(read_file(path, columns, skip)[0], part)


def choose_part(questions: list[dict], part: str) -> Iterator[dict]:
    """Yield the questions of one part: all, train, or held out (every fifth passage)."""
    passages: dict[str, int] = {}  # numbers of the distinct passages; one passage can be in several rows
    for question in questions:
        number = passages.setdefault(question["context"], len(passages))
        held_out = number % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        if part == "all" or held_out == (part == "held out"):
            yield question


def read_file(path: str, columns: str | None = None, skip: bool = False) -> tuple[list[dict], list[str], list[str]]:
    """Return all questions of a file (id, question, context, answers), checked, lines for the log, and unusable rows.

    columns: names of the columns for context, question and answers, separated by commas, if a table has other names
    than usual. skip: leave out the rows that cannot be used. Otherwise they raise WorkshopError (exit code 2), which
    lists them with place and reason.
    """
    chosen, rows = read_rows(path, columns)
    found: dict[tuple, dict] = {}
    unusable: list[str] = []
    used = empty = 0
    for row in rows:
        if row.cells is None:
            empty += 1
            continue
        try:
            question = check_row(row, chosen)
            # In a table a repeated question has another answer. SQuAD lists all answers with the question
            key = (question["context"], question["question"], row.place if chosen is SQUAD else "")
            merge_answers(found.setdefault(key, question)["answers"], question["answers"])
        except RowError as error:
            unusable.append(f"{row.place}: {error}")
        else:
            used += 1
    assert used + len(unusable) + empty == len(rows), "each row is used, empty, or listed"
    if unusable and not skip:
        kind = "questions" if chosen is SQUAD else "rows"
        what = f"{len(unusable)} of {len(rows)} {kind} cannot be used: {shorten_list(unusable)}"
        raise WorkshopError(path, what, "correct them, or leave them out with BAD_ROWS=skip")
    if not found:
        what = f"has no questions that can be used: {shorten_list(unusable)}" if unusable else "has no questions"
        raise WorkshopError(path, what, "give a table with context, question and answer in each row")
    notes = []
    if chosen is SQUAD and columns:
        notes.append(f"TABLE_COLUMNS has no effect on {path}, which is a SQuAD file")
    if chosen is not SQUAD:
        notes.append(f"columns of {path}: {chosen.context}, {chosen.question}, {' + '.join(chosen.answers)}")
    if unusable or empty:
        purpose = f" for {len(found)} question(s)" if used > len(found) else ""
        notes.append(f"rows of {path}: {used} used{purpose}, {len(unusable)} left out, {empty} empty")
    if unusable:
        notes.append(f"left out: {shorten_list(unusable)}")
    return list(found.values()), notes, unusable


def merge_answers(answers: list[str], others: list[str]) -> None:
    """Add other answers to the same question. Raise RowError if only one of the lists says that there is none."""
    if (answers == [UNANSWERABLE]) != (others == [UNANSWERABLE]):
        raise RowError("the question is also in another row, and only one of the rows has an answer")
    answers += [answer for answer in others if answer not in answers]


def shorten_list(entries: list[str]) -> str:
    more = f" and {len(entries) - SHOWN} more" if len(entries) > SHOWN else ""
    return ", ".join(entries[:SHOWN]) + more


# 1. Formats


def read_rows(path: str, columns: str | None) -> tuple[Columns, list[Row]]:
    """Return the columns and all rows of a file."""
    kind = Path(path).suffix.lower()
    text = decode(path, read_bytes(path, READABLE))
    if kind in (".csv", ".tsv"):
        return read_delimited(path, text, columns)
    if kind in (".jsonl", ".ndjson") or is_json_lines(text):
        lines = re.split(r"\r\n?|\n", text)  # splitlines would also split inside texts, at U+2028
        rows = [Row(f"line {number}", parse_line(line)) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        content: Any = parse_json(path, text, "is the file complete?")
        listed = content if isinstance(content, list) else require(path, "", content, "data", list)
        if any(isinstance(each, dict) and "paragraphs" in each for each in listed) or not listed:
            return SQUAD, list(read_squad(path, listed))
        rows = [Row(f"row {number}", cells) for number, cells in enumerate(listed, 1)]
    names = list(dict.fromkeys(name for row in rows if isinstance(row.cells, dict) for name in row.cells))
    return choose_columns(path, names, columns), rows


def read_squad(path: str, articles: list) -> Iterator[Row]:
    for a, article in enumerate(articles):
        for p, paragraph in enumerate(require(path, f"data[{a}]", article, "paragraphs", list)):
            place = f"data[{a}].paragraphs[{p}]"
            for q, question in enumerate(require(path, place, paragraph, "qas", list)):
                cells = question
                if isinstance(question, dict):
                    cells = {"is_impossible": False, **question, "context": paragraph.get("context")}
                yield Row(f"{place}.qas[{q}]", cells)


def require(path: str, place: str, holder: object, key: str, kind: type) -> Any:
    """Return ``holder[key]``, which must have the given type."""
    value = holder.get(key) if isinstance(holder, dict) else None
    if not isinstance(value, kind):
        entry = f"{path}: {place}.{key}".replace(": .", ": ")
        found = "is missing" if value is None else f"is {value!r:.40}"
        raise WorkshopError(entry, f"{found}, expected a {kind.__name__}", "see data/README.md for the formats")
    return value


def parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError) as error:
        return RowError(f"is not JSON ({error})")


def read_delimited(path: str, text: str, columns: str | None) -> tuple[Columns, list[Row]]:
    """Read a CSV or TSV file. Row 1 has the names of the columns.

    A cell between quotes can contain line ends. So a cell whose quote is not closed swallows the following rows, until
    another quote. If each line of a row is a usable row by itself, the row is such a cell: it is listed, and reading
    continues with the line after its first one.
    """
    csv.field_size_limit(max(csv.field_size_limit(), len(text)))
    # Programs for the Macintosh end a row with a carriage return, and may have line feeds in cells
    end = "\r" if "\r" in text.partition("\n")[0].rstrip("\r") else "\n"
    lines = [line + end for line in text.removesuffix(end).split(end)]
    first = 0
    delimiter = max(",;\t|", key=lines[0].count)
    if lines[0].lower().startswith("sep="):  # Excel's own way to name the delimiter
        delimiter = lines[0][4]
        first = 1
    names: list[str] = []
    chosen = SQUAD
    rows = []
    number = 0
    while first < len(lines):
        number += 1
        cells, count = next_row(lines, first, delimiter)
        if not names and isinstance(cells, list) and any(cells):
            names = [IMPOSSIBLE if cell.strip().lower() == IMPOSSIBLE else cell.strip() for cell in cells]
            chosen = choose_columns(path, names, columns)
        elif names:
            if count > 1 and all(is_row(line, names, delimiter, chosen) for line in lines[first : first + count]):
                cells, count = RowError("a quote at the beginning of a cell is not closed"), 1
            rows.append(Row(f"row {number}", name_cells(cells, names, delimiter)))
        first += count
    return chosen, rows


def next_row(lines: list[str], first: int, delimiter: str) -> tuple[list[str] | RowError, int]:
    """Return the cells of the row that begins in line `first`, and its number of lines."""
    reader = csv.reader((lines[n] for n in range(first, len(lines))), delimiter=delimiter, strict=True)
    try:
        return next(reader), reader.line_num
    except csv.Error as error:
        return RowError(f"a quotation mark is not closed, or is inside a cell ({error})"), 1


def name_cells(cells: list[str] | RowError, names: list[str], delimiter: str) -> Any:
    """Return column -> cell of a row, None for an empty row, or the RowError of a row with too few or many cells."""
    if isinstance(cells, RowError):
        return cells
    if not any(cell.strip() for cell in cells):
        return None
    if len(cells) != len(names):
        advice = f"put quotes around a text that contains {delimiter!r}" if len(cells) > len(names) else "complete it"
        return RowError(f"{len(cells)} cells, but the first line has {len(names)} ({advice})")
    named: dict[str, Any] = dict(zip(names, cells, strict=True))
    if IMPOSSIBLE in named:
        named[IMPOSSIBLE] = TRUTH.get(named[IMPOSSIBLE].strip().lower(), named[IMPOSSIBLE])
    return named


def is_row(line: str, names: list[str], delimiter: str, chosen: Columns) -> bool:
    """Return whether a line is a usable row by itself, without its one unpaired quotation mark."""
    # Inside a quoted cell, a quotation mark is written twice. So an odd number of marks in a row has an unpaired one
    unpaired = [run.start() for run in re.finditer(r'(?<!")"(?:"")*(?!")', line)]
    for text in [line, *(line[:mark] + line[mark + 1 :] for mark in unpaired)]:
        with contextlib.suppress(RowError):
            cells = next_row([text], 0, delimiter)[0]
            return bool(check_row(Row("", name_cells(cells, names, delimiter)), chosen))
    return False


def choose_columns(path: str, names: list[str], given: str | None) -> Columns:
    """Return the columns to use: the given ones, or else those with usual names.

    Raise WorkshopError (exit code 2) if a column is missing, or if two columns have the same name.
    """
    repeated = [name for name in names if name and names.count(name) > 1]
    if repeated:
        raise WorkshopError(path, f"two columns have the name {repeated[0]}", "give one of them another name")
    if given:
        wanted = [name.strip() for name in given.split(",")]
        for name in wanted:
            if name not in names:
                remedy = did_you_mean(name, names, f"its columns are {', '.join(names)}")
                raise WorkshopError("TABLE_COLUMNS", f"{path} has no column {name!r}", remedy)
        if len(wanted) < 3:
            what = f"{given!r} names {len(wanted)} columns"
            raise WorkshopError("TABLE_COLUMNS", what, "name those of context, question and answer, in this order")
        return Columns(wanted[0], wanted[1], wanted[2:])
    usual = {kind: [n for word in words for n in names if n.lower() == word] for kind, words in USUAL_NAMES.items()}
    unknown = [kind for kind, found in usual.items() if not found]
    if unknown:
        what = f"none of its columns ({', '.join(names)}) has a usual name for the {' and the '.join(unknown)}"
        raise WorkshopError(path, what, "name them, for example TABLE_COLUMNS=passage,query,reply")
    return Columns(usual["context"][0], usual["question"][0], usual["answer"][:1])


# 2. Rows


def check_row(row: Row, chosen: Columns) -> dict:
    """Return the question of a row. Raise RowError with the reason if it cannot be used."""
    cells = row.cells
    if isinstance(cells, RowError):
        raise cells
    if not isinstance(cells, dict):
        raise RowError("is not an object with columns")
    context = read_text(cells, chosen.context)
    question = read_text(cells, chosen.question).strip()
    in_columns = [read_answers(cells.get(column), context) for column in chosen.answers]
    answers = [answer for column in in_columns for answer in column or []]
    impossible = cells.get(IMPOSSIBLE)
    if not isinstance(impossible, bool | None):
        raise RowError(f"is_impossible is {impossible!r:.40}, expected true or false")
    if impossible and answers:
        raise RowError("is_impossible is true, but there is an answer")
    says_so = impossible or (impossible is None and any(column == [] for column in in_columns))
    if not answers and not says_so:
        raise RowError("the answer is empty (if the passage does not answer the question, write [] or is_impossible)")
    identifier = next((str(cells[name]) for name in IDS if cells.get(name)), row.place)
    if half := HALF_CHARACTER.search("\n".join([identifier, question, context, *answers])):
        raise RowError(f"a text has {half[0]!a}, which is only a half of a character")
    return {"id": identifier, "question": question, "context": context, "answers": answers or [UNANSWERABLE]}


def read_text(cells: dict[str, Any], column: str) -> str:
    value = cells.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{column} is empty")
    if not isinstance(value, str):
        raise RowError(f"{column} is not a text: {value!r:.40}")
    return value


def read_answers(value: Any, context: str) -> list[str] | None:
    """Return the answers in a cell, each of them a part of the context. None for an empty cell.

    value: a text, a list, a list as JSON text, or a dict with lists, as datasets of the Hub have it.
    """
    if isinstance(value, str) and value.strip() == "[]":
        return []  # even if the context contains these two characters
    if isinstance(value, str) and value.strip() not in context and value.strip()[:1] in ("[", "{"):
        parsed = parse_line(value)
        value = value if isinstance(parsed, RowError) else parsed
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
    return [read_answer(each, context) for each in (value if isinstance(value, list) else [value])]


def read_answer(value: Any, context: str) -> str:
    """Return the text of an answer. value: a text, a whole number, or SQuAD's dict with text and answer_start."""
    text, start = (value.get("text"), value.get("answer_start")) if isinstance(value, dict) else (value, None)
    if isinstance(text, int) and not isinstance(text, bool):
        text = str(text)
    if not isinstance(text, str) or not text.strip():
        raise RowError(f"an answer is not a text: {text!r:.40}")
    if start is None:
        text = text.strip()
        if text not in context:
            other = context.lower().find(text.lower())
            near = f", only {context[other : other + len(text)]!r:.60}" if other >= 0 else ""
            raise RowError(f"the passage does not contain the answer {text!r:.60}{near}")
    elif not isinstance(start, int) or start < 0 or not context.startswith(text, start):
        raise RowError(f"the answer {text!r:.40} is not at answer_start {start!r:.40}, which counts characters from 0")
    return text
