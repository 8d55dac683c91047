"""Convert a table of questions to a SQuAD file, which train.py reads.

    python scripts/to_squad.py questions.csv my-squad.json
    python scripts/to_squad.py questions.csv my-squad.json --context passage --question question --answer answer
    python scripts/to_squad.py questions.csv my-squad.json --skip          # leave out the rows that cannot be used

The table is a CSV or TSV file, JSON Lines, a JSON list of objects, or rows as a SQuAD dataset of the Hub has them. Each
row has a passage, a question about it, and an answer that is a part of the passage. For several answers to a question,
name several columns (--answer answer1 answer2), write a JSON list into the cell, or repeat the row with another answer.
With --unanswerable, an empty answer means that the passage does not answer the question. Otherwise it is an error.
"""

import argparse
import csv
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from shared.errors import OneLineErrors, WorkshopError, did_you_mean, run_program
from shared.json_files import is_json_lines, parse_json, read_bytes, write_json

# Usual names of the columns, the most usual first
NAMES = {
    "context": ("context", "passage", "paragraph", "text", "document", "article", "source"),
    "question": ("question", "query", "prompt", "instruction", "input"),
    "answer": ("answers", "answer", "response", "label", "output", "target", "completion"),
}
DELIMITED = (".csv", ".tsv")
IDS = ("id", "qid", "question_id")
HELD_OUT_EVERY = 5  # the value of data_loader.py, whose import takes seconds


@dataclass
class Question:
    """A question of a passage. answers: its distinct answers, empty if the passage does not answer it."""

    id: str
    answers: list[dict[str, Any]] = field(default_factory=list)


class RowError(Exception):
    """The reason why a row cannot be used."""


def main() -> None:
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("table", help="the file to convert: .csv, .tsv, .jsonl or .json")
    parser.add_argument("output", help="the SQuAD file to write")
    parser.add_argument("--context", help=f"column of the passage; by default {' or '.join(NAMES['context'])}")
    parser.add_argument("--question", help=f"column of the question; by default {' or '.join(NAMES['question'])}")
    parser.add_argument(
        "--answer", nargs="+", help=f"column(s) of the answer; by default {' or '.join(NAMES['answer'])}"
    )
    parser.add_argument("--unanswerable", action="store_true", help="accept empty answers: the passage has no answer")
    parser.add_argument("--skip", action="store_true", help="leave out the rows that cannot be used")
    arguments = parser.parse_args()
    table, output = Path(arguments.table), Path(arguments.output)
    if output.exists():
        raise WorkshopError(output, "already exists", "give another name, or remove it")
    rows = list(read_table(table))
    columns = list(dict.fromkeys(name for _, row in rows if isinstance(row, dict) for name in row))
    if not columns:
        raise WorkshopError(table, "has no rows", "give a table with a first line of column names")
    chosen = {name: find_columns(table, name, getattr(arguments, name), columns) for name in NAMES}
    if unknown := [name for name, found in chosen.items() if not found]:
        what = f"none of its columns ({', '.join(columns)}) has a usual name for the {' and the '.join(unknown)}"
        raise WorkshopError(table, what, f"add {' '.join(f'--{name} COLUMN' for name in unknown)}")
    print("columns: " + ", ".join(f"{name} = {' + '.join(names)}" for name, names in chosen.items()))
    passages: dict[str, dict[str, Question]] = {}
    faults = []
    for place, row in rows:
        try:
            add_row(passages, place, row, chosen, arguments.unanswerable)
        except RowError as error:
            faults.append(f"  {place}: {error}")
    if faults:
        note = " (row 1 has the names of the columns)" if table.suffix.lower() in DELIMITED else ""
        print(f"{len(faults)} of {len(rows)} rows cannot be used{note}:", *faults, sep="\n")
    if faults and not arguments.skip:
        raise WorkshopError(table, f"{len(faults)} rows cannot be used", "correct them, or leave them out with --skip")
    if not passages:
        raise WorkshopError(table, "no row can be used", "see the reasons above")
    write(output, table.stem, passages)


def read_table(path: Path) -> Iterator[tuple[str, Any]]:
    """Yield place and content of each row. The content of a row that cannot be read is a RowError.

    Raise WorkshopError (exit code 2) if the file is not a table.
    """
    kind = path.suffix.lower()
    if kind not in (*DELIMITED, ".jsonl", ".ndjson", ".json"):
        raise WorkshopError(path, "its name says neither CSV, TSV nor JSON", "save it as .csv, .tsv, .jsonl or .json")
    try:
        text = read_bytes(path, "check the path and its permissions").decode("utf-8-sig")  # Excel writes a mark first
    except UnicodeDecodeError as error:
        raise WorkshopError(path, f"is not UTF-8 ({error})", "save it as UTF-8") from error
    if kind in DELIMITED:
        yield from read_delimited(text)
    elif kind == ".json" and not is_json_lines(text):
        content: Any = parse_json(path, text.encode(), "is the file complete?")
        rows = content.get("data", [content]) if isinstance(content, dict) else content
        if rows and isinstance(rows, list) and isinstance(rows[0], dict) and "paragraphs" in rows[0]:
            raise WorkshopError(path, "is a SQuAD file already", "give it to train.py as --dataset")
        for number, row in enumerate(rows if isinstance(rows, list) else [], 1):
            yield f"row {number}", row
    else:
        for number, line in enumerate(text.splitlines(), 1):
            if line.strip():
                yield f"line {number}", parse_line(line)


def read_delimited(text: str) -> Iterator[tuple[str, Any]]:
    """Yield place and content of each row of a CSV or TSV file. Row 1 is the line with the names of the columns."""
    csv.field_size_limit(len(text) + 1)
    head = text.partition("\n")[0]
    reader = csv.reader(io.StringIO(text, newline=""), delimiter=max(",;\t|", key=head.count), strict=True)
    names: list[str] = []
    number = 0
    while True:
        number += 1
        try:
            cells = next(reader)
        except StopIteration:
            return
        except csv.Error as error:
            yield f"row {number}", RowError(f"wrong quotes ({error})")
            continue
        if not names:
            names = [cell.strip() for cell in cells]
        elif len(cells) > len(names):
            yield f"row {number}", RowError(f"{len(cells)} cells, but the first line has {len(names)}")
        elif any(cells):
            yield f"row {number}", dict(zip(names, cells, strict=False))


def parse_line(line: str) -> Any:
    try:
        return json.loads(line)
    except ValueError as error:
        return RowError(f"is not JSON ({error})")


def find_columns(table: Path, name: str, given: str | list[str] | None, columns: list[str]) -> list[str]:
    """Return the columns of a flag. Without the flag, return the column that has a usual name, if there is one.

    Raise WorkshopError (exit code 2) if the table has no column of the given name.
    """
    names = [given] if isinstance(given, str) else given or []
    for each in names:
        if each not in columns:
            way_out = did_you_mean(each, columns, f"its columns are {', '.join(columns)}")
            raise WorkshopError(f"--{name}", f"{table} has no column {each}", way_out)
    usual = [column for each in NAMES[name] for column in columns if column.lower() == each]
    return names or usual[:1]


def add_row(
    passages: dict[str, dict[str, Question]],
    place: str,
    row: Any,
    chosen: dict[str, list[str]],
    unanswerable: bool,
) -> None:
    """Add a row to `passages`: passage -> question -> Question. Raise RowError if the row cannot be used."""
    if isinstance(row, RowError):
        raise row
    if not isinstance(row, dict):
        raise RowError("is not an object with columns")
    context = cell(row, chosen["context"][0])
    question = cell(row, chosen["question"][0]).strip()
    answers = [each for column in chosen["answer"] for each in answer_texts(row.get(column))]
    impossible = str(row.get("is_impossible", "")).lower() in ("true", "1")
    explicit = any(isinstance(row.get(column), dict | list) for column in chosen["answer"])  # an empty list is meant
    if not answers and not (impossible or explicit or unanswerable):
        raise RowError("the answer is empty (--unanswerable: the passage does not answer the question)")
    found = []
    for answer in [] if impossible else answers:
        if (start := context.find(answer)) < 0:
            other = context.lower().find(answer.lower())
            near = f", only {context[other : other + len(answer)]!r}" if other >= 0 else ""
            raise RowError(f"the passage does not contain the answer {answer!r:.60}{near}")
        found.append({"text": answer, "answer_start": start})
    id_ = next((str(row[name]) for name in IDS if row.get(name) not in (None, "")), place.replace(" ", "-"))
    known = passages.setdefault(context, {}).setdefault(question, Question(id_))
    for each in found:
        if each not in known.answers:
            known.answers.append(each)


def cell(row: dict[str, Any], column: str) -> str:
    """Return the text of a cell. Raise RowError if it is not a text or blank."""
    value = row.get(column)
    if value is None or (isinstance(value, str) and not value.strip()):
        raise RowError(f"{column} is empty")
    if not isinstance(value, str):
        raise RowError(f"{column} is not a text: {value!r:.60}")
    return value


def answer_texts(value: Any) -> list[str]:
    """Return the answers in a cell: a text, a list, a JSON list as text, or the Hub's ``{"text": [...]}``."""
    if isinstance(value, str) and value.lstrip().startswith(("[", "{")):
        parsed = parse_line(value)
        value = value if isinstance(parsed, RowError) else parsed
    if isinstance(value, dict):
        value = value.get("text")
    if value is None:
        return []
    texts = []
    for each in value if isinstance(value, list) else [value]:
        text = each.get("text") if isinstance(each, dict) else each
        if isinstance(text, bool | list | dict):
            raise RowError(f"the answer is not a text: {text!r:.60}")
        texts.append("" if text is None else str(text).strip())
    return [text for text in texts if text]


def write(output: Path, title: str, passages: dict[str, dict[str, Question]]) -> None:
    """Write the SQuAD file and print its size."""
    paragraphs = []
    for context, questions in passages.items():
        qas = [
            {"id": each.id, "question": question, "answers": each.answers, "is_impossible": not each.answers}
            for question, each in questions.items()
        ]
        paragraphs.append({"context": context, "qas": qas})
    try:
        write_json(output, {"version": "v2.0", "data": [{"title": title, "paragraphs": paragraphs}]})
    except OSError as error:
        raise WorkshopError(output, error.strerror or "cannot be written", "give another path") from error
    count = sum(map(len, passages.values()))
    print(f"{output}: {count} questions about {len(passages)} passages")
    if len(passages) < HELD_OUT_EVERY:
        print(f"train.py evaluates on every {HELD_OUT_EVERY}th passage: add passages, or give it an --eval_dataset")
    print(f"Next: python scripts/train.py --model_name YOUR_MODEL --dataset {output}")


if __name__ == "__main__":
    run_program(main)
