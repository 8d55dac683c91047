"""Read examples from a file: SQuAD, a table as CSV, TSV, JSON Lines or a JSON list of objects, or a plain text.

The folder tasks/ has the kinds of rows, such as a passage with a question and its answer, or a conversation.

Each row is used, is empty, or cannot be used for a reason. The reasons are listed, and no row is lost without one.
"""

import csv
import json
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from shared.errors import HALF_CHARACTER, WorkshopError, join_first
from shared.json_files import decode, parse_json, read_bytes
from tasks import choose_task
from tasks.passage import IMPOSSIBLE, NOT_IN_PASSAGE, PASSAGE, SQUAD, TRUTH, UNANSWERABLE
from tasks.task import IDS, Columns, RowError, Task
from tasks.text import TEXT

HELD_OUT_EVERY = 5
READABLE = "check the path and its permissions"
SHOWN = 10  # rows at most, in a list of rows that cannot be used
TEXTS = (".txt", ".md")
FORMATS = (".json", ".jsonl", ".ndjson", ".csv", ".tsv", *TEXTS)


class Row(NamedTuple):
    """A row of a table, or a question of a SQuAD file.

    place: where it is in the file. cells: a value for each column; None for an empty row; a RowError if the row cannot
    be read.
    """

    place: str
    cells: Any


class Reading(NamedTuple):
    """The content of a file.

    examples: checked. notes: lines for the log. left_out: the rows that cannot be used, and why. content: the bytes.
    """

    examples: list[dict]
    notes: list[str]
    left_out: list[str]
    content: bytes = b""


def choose_part(units: Iterable, part: str, name: str, kind: str) -> list[int]:
    """Return the numbers of the examples of one part: all, train, or held out (every fifth unit).

    units: the unit of each example, for one passage can be in several rows. name: the file. kind: of units, such as
    passage. Raise WorkshopError (exit code 2) if no unit is held out.
    """
    numbers: dict[Any, int] = {}
    held_out = [numbers.setdefault(unit, len(numbers)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1 for unit in units]
    chosen = [place for place, held in enumerate(held_out) if part == "all" or held == (part == "held out")]
    if not chosen:
        what = f"has only {len(numbers)} different {kind}s, and every fifth one is held out for the evaluation"
        raise WorkshopError(name, what, f"give --eval_dataset, or at least {HELD_OUT_EVERY} {kind}s")
    return chosen


def read_file(path: str, columns: str | None = None, skip: bool = False, free: bool = False) -> Reading:
    """Return the checked examples of a file. For the other arguments, see `check_rows` and `choose_task`."""
    content = read_bytes(path, READABLE)
    task, chosen, names, rows = read_rows(path, decode(path, content), columns, free)
    reading = check_rows(path, task, chosen, names, rows, skip)
    if columns and not names:
        reading.notes.append(f"TABLE_COLUMNS has no effect on {path}, which is not a table")
    return reading._replace(content=content)


def check_rows(path: str, task: Task, chosen: Columns, names: list[str], rows: list[Row], skip: bool) -> Reading:
    """Return the examples of all rows.

    chosen: the columns to read, of the columns `names`. skip: leave out the rows that cannot be used. Otherwise they
    raise WorkshopError (exit code 2), which lists them with place and reason.
    """
    found: dict[Any, dict] = {}
    unusable: list[str] = []
    used = empty = 0
    for row in rows:
        if row.cells is None:
            empty += 1
            continue
        try:
            example = check_row(row, task, chosen)
            key = row.place if chosen.squad or not task.key else task.key(example)
            merge_answers(found.setdefault(key, example)["answers"], example["answers"])
        except RowError as error:
            unusable.append(f"{row.place}: {error}")
        else:
            used += 1
    assert used + len(unusable) + empty == len(rows), "each row is used, empty, or listed"
    kind = "questions" if chosen.squad else "rows"
    if unusable and not skip:
        what = f"{len(unusable)} of {len(rows)} {kind} cannot be used: {join_first(unusable, most=SHOWN)}"
        free = "give ANSWERS=free to allow such answers, " if any(NOT_IN_PASSAGE in row for row in unusable) else ""
        raise WorkshopError(path, what, f"correct them, {free}or leave them out with BAD_ROWS=skip")
    if not found:
        what = f"has no {kind} that can be used: {join_first(unusable, most=SHOWN)}" if unusable else f"has no {kind}"
        raise WorkshopError(path, what, "see data/README.md for the formats")
    read = ", ".join(filter(None, [chosen.first, chosen.second, " + ".join(chosen.others)]))
    unread = [name for name in names if name not in (*chosen[:2], *chosen.others, *IDS, IMPOSSIBLE)]
    ignored = f"; not used: {', '.join(unread)}" if unread else ""
    notes = [f"columns of {path}: {read} (kind: {task.name}){ignored}"]
    if unusable or empty:
        purpose = f" for {len(found)} question(s)" if used > len(found) else ""
        notes.append(f"rows of {path}: {used} used{purpose}, {len(unusable)} left out, {empty} empty")
    if unusable:
        notes.append(f"left out: {join_first(unusable, most=SHOWN)}")
    return Reading([*found.values()], notes, unusable)


def merge_answers(answers: list[str], others: list[str]) -> None:
    """Add other answers to the same question. Raise RowError if only one of the lists says that there is none."""
    if (answers == [UNANSWERABLE]) != (others == [UNANSWERABLE]):
        raise RowError("the question is also in another row, and only one of the rows has an answer")
    answers += [answer for answer in others if answer not in answers]


# 1. Formats


def read_rows(path: str, text: str, columns: str | None, free: bool) -> tuple[Task, Columns, list[str], list[Row]]:
    """Return the kind of a file, the columns to read, the names of all columns, and all rows."""
    kind = Path(path).suffix.lower()
    if kind in TEXTS:
        return TEXT, Columns("text"), [], [Row(Path(path).name, {"text": text} if text.strip() else None)]
    if kind in (".csv", ".tsv"):
        return read_delimited(path, text, columns, free)
    # Two objects of JSON Lines have no comma between them
    if kind in (".jsonl", ".ndjson") or re.search(r"\}\s*[\r\n]\s*\{", text):
        lines = re.split(r"\r\n?|\n", text)  # splitlines would also split inside texts, at U+2028
        rows = [Row(f"line {number}", parse_line(line)) for number, line in enumerate(lines, 1) if line.strip()]
    else:
        content: Any = parse_json(path, text, "is the file complete?")
        listed = content if isinstance(content, list) else require(path, "", content, "data", list)
        if any(isinstance(each, dict) and "paragraphs" in each for each in listed) or not listed:
            return PASSAGE, SQUAD._replace(free=free), [], list(read_squad(path, listed))
        rows = [Row(f"row {number}", cells) for number, cells in enumerate(listed, 1)]
    objects = [row.cells for row in rows if isinstance(row.cells, dict)]
    names = list(dict.fromkeys(name for cells in objects for name in cells))
    return *choose_task(path, names, columns, free, next(iter(objects), {})), names, rows


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


def read_delimited(path: str, text: str, columns: str | None, free: bool) -> tuple[Task, Columns, list[str], list[Row]]:
    """Read a CSV or TSV file. Row 1 has the names of the columns.

    A cell between quotes can contain line ends. A row whose quote is not closed is listed, and reading continues with
    the next line. If other rows have several lines, this might be a part of the row, which could pass for another row.
    So such a file is refused.
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
    task, chosen = PASSAGE, SQUAD
    rows = []
    number = longest = torn = 0
    while first < len(lines):
        number += 1
        cells, count = next_row(lines, first, delimiter)
        longest = max(longest, count)
        torn = number if isinstance(cells, RowError) else torn
        if not names and isinstance(cells, list) and any(cells):
            names = [IMPOSSIBLE if cell.strip().lower() == IMPOSSIBLE else cell.strip() for cell in cells]
            task, chosen = choose_task(path, names, columns, free, {})
        elif names:
            rows.append(Row(f"row {number}", name_cells(cells, names, delimiter)))
        first += count
    if torn and longest > 1:
        what = f"row {torn}: a quotation mark is not closed, so it is not certain where the next row begins"
        raise WorkshopError(path, what, "correct this row, or another one near it")
    return task, chosen, names, rows


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


# 2. Rows


def check_row(row: Row, task: Task, chosen: Columns) -> dict:
    """Return the example of a row. Raise RowError with the reason if it cannot be used."""
    if isinstance(row.cells, RowError):
        raise row.cells
    if not isinstance(row.cells, dict):
        raise RowError("is not an object with columns")
    example = task.read(row.cells, chosen, row.place)
    if half := HALF_CHARACTER.search(json.dumps(example, ensure_ascii=False)):
        raise RowError(f"a text has {half[0]!a}, which is only a half of a character")
    return example
