"""Tests of question files: every format is read, and each row of a table is used, empty, or listed with its reason."""

import json
import random

import pytest

from read_questions import SHOWN, UNANSWERABLE, read_file

CONTEXT = "Nodes send over a fast network. Each node holds eight GPUs."
ROW = {"context": CONTEXT, "question": "How many?", "answer": "eight"}
HUB_ROW = ROW | {"answer": {"text": ["eight"], "answer_start": [CONTEXT.index("eight")]}}
NAMES = "context,question,answer\n"


def lines(*rows: object) -> str:
    return "".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


# Formats

TABLES = {
    "commas": ("t.csv", f'{NAMES}"{CONTEXT}",How many?,eight\n'),
    "a byte order mark and semicolons": ("t.csv", f"\ufeffContext;Question;Answer\n{CONTEXT};How many?;eight\n"),
    "Excel's line for the delimiter": ("t.csv", f"sep=;\r\nContext;Question;Answer\r\n{CONTEXT};How many?;eight\r\n"),
    "tabs": ("t.tsv", f"passage\tquery\tlabel\r\n{CONTEXT}\tHow many?\teight\r\n"),
    "a blank line first": ("t.csv", f'\n{NAMES}"{CONTEXT}",How many?,eight\n'),
    "carriage returns": ("t.csv", f"{NAMES}{CONTEXT},How many?,eight\n".replace("\n", "\r")),
    "UTF-16, as PowerShell writes it": ("t.csv", f'{NAMES}"{CONTEXT}",How many?,eight\r\n'.encode("utf-16")),
    "JSON in UTF-16": ("t.json", json.dumps([ROW], indent=2).encode("utf-16")),
    "no line end": ("t.csv", f'{NAMES}"{CONTEXT}",How many?,eight'),
    "JSON Lines": ("t.jsonl", lines(ROW)),
    "JSON Lines by another name": ("t.json", lines(ROW, ROW)),
    "JSON Lines with carriage returns": ("t.json", lines(ROW, ROW).replace("\n", "\r")),
    "a JSON list": ("t.json", json.dumps([ROW], indent=2)),
    "rows of the Hub": (
        "t.json",
        json.dumps({"data": [HUB_ROW]}),
    ),
}


@pytest.mark.parametrize(("name", "content"), TABLES.values(), ids=TABLES)
def test_a_table_becomes_questions(written, name, content):
    (question,), *_ = read_file(written(content, name))
    assert (question["context"], question["question"], question["answers"]) == (CONTEXT, "How many?", ["eight"])


def test_several_answers_and_no_answer(written):
    rows = [
        ROW | {"id": 7, "answer": ["eight", "eight GPUs"]},
        ROW | {"question": "Over what?", "answer": '["a fast network", "network"]'},  # a cell of a CSV file
        ROW | {"question": "Twice?", "answer": "Nodes"},
        ROW | {"question": "Twice?", "answer": "node"},
        ROW | {"question": "Who?", "answer": []},
        {"context": CONTEXT, "question": "When?", "is_impossible": True},
    ]
    questions, *_ = read_file(written(json.dumps(rows), "t.json"))
    assert [row["id"] for row in questions] == ["7", "row 2", "row 3", "row 5", "row 6"]
    expected = [["eight", "eight GPUs"], ["a fast network", "network"], ["Nodes", "node"]]
    assert [row["answers"] for row in questions] == [*expected, [UNANSWERABLE], [UNANSWERABLE]]


def test_columns_with_other_names(written):
    path = written(f"text,q,a1,a2,is_impossible\n{CONTEXT},How many?,eight,GPUs,\n{CONTEXT},Who?,,,TRUE\n", "t.csv")
    questions, notes, *_ = read_file(path, "text, q, a1, a2")
    assert [row["answers"] for row in questions] == [["eight", "GPUs"], [UNANSWERABLE]]
    assert notes == ["columns of t.csv: text, q, a1 + a2 (kind: passage)"]


# Rows that cannot be used

FAULTS = {
    "context is empty": [ROW | {"context": ""}, ROW | {"context": None}, ROW | {"context": " \n"}],
    "context is not a text: 3": [ROW | {"context": 3}],
    "context is not a text: ['": [ROW | {"context": [CONTEXT]}],
    "question is empty": [ROW | {"question": " "}],
    "question is missing": [{"context": CONTEXT, "answer": "eight"}],
    "question is not a text: {": [ROW | {"question": {"text": "How many?"}}],
    "the answer is empty (if": [ROW | {"answer": ""}, ROW | {"answer": None}, ROW | {"answer": "  "}],
    "the passage does not contain the answer 'nine'": [ROW | {"answer": "nine"}, ROW | {"answer": ["eight", "nine"]}],
    "the passage does not contain the answer 'EIGHT', only 'eight'": [ROW | {"answer": "EIGHT"}],
    "the passage does not contain the answer '8'": [ROW | {"answer": 8}, ROW | {"answer": {"text": ["8"]}}],
    "an answer is not a text: True": [ROW | {"answer": True}],
    "an answer is not a text: nan": [ROW | {"context": "Bananas", "answer": float("nan")}],
    "an answer is not a text: [": [ROW | {"answer": [["eight"]]}],
    "an answer is not a text: ''": [ROW | {"answer": ["eight", ""]}],
    "the answer 'eight' is not at answer_start 3,": [ROW | {"answer": [{"text": "eight", "answer_start": 3}]}],
    "answer_start is [0], expected a list": [ROW | {"answer": {"text": ["eight", "GPUs"], "answer_start": [0]}}],
    "is_impossible is 'false', expected true or false": [ROW | {"is_impossible": "false"}],
    "is_impossible is true, but there is an answer": [ROW | {"is_impossible": True}],
    "is not an object with columns": [3, ["eight"]],
    "a text has '\\ud83d', which is only a half of a character": [
        *(ROW | {name: f"{ROW[name]} \ud83d"} for name in ("context", "question")),
        ROW | {"context": "a \ud83d", "answer": "\ud83d"},
        ROW | {"id": "\ud83d"},
    ],
    "is not JSON (": ['{"context": "cut', "no JSON", "{'context': 'quotes of Python'}"],
}


@pytest.mark.promise("your own model and data: from a table to a model that answers")
def test_each_unusable_row_is_listed_and_left_out_on_request(written, refusal):
    faulty = [(reason, row) for reason, rows in FAULTS.items() for row in rows]
    for number in range(0, len(faulty), SHOWN):  # one error shows this many
        part = faulty[number : number + SHOWN]
        path = written(lines(ROW, *(row for _, row in part), ROW | {"question": "Last?"}), "t.jsonl")
        error = refusal(read_file, path)
        assert error.startswith(f"error: t.jsonl: {len(part)} of {len(part) + 2} rows cannot be used: line 2: ")
        assert error.endswith("or leave them out with BAD_ROWS=skip")
        for place, (reason, _) in enumerate(part, 2):
            assert f"line {place}: {reason}" in error
        questions, notes, *_ = read_file(path, skip=True)
        assert [row["question"] for row in questions] == ["How many?", "Last?"]
        assert f"rows of t.jsonl: 2 used, {len(part)} left out, 0 empty" in notes
    path = written(lines(ROW, ROW, faulty[0][1]), "t.jsonl")
    assert "rows of t.jsonl: 2 used for 1 question(s), 1 left out, 0 empty" in read_file(path, skip=True)[1]
    path = written(lines(*(row for _, row in faulty), ROW), "t.jsonl")
    assert f" and {len(faulty) - SHOWN} more; correct" in refusal(read_file, path)


def test_rows_that_contradict_each_other_cannot_be_used(written):
    rows = [ROW, ROW | {"answer": []}]
    (question,), notes, *_ = read_file(written(lines(*rows), "t.jsonl"), skip=True)
    assert question["answers"] == ["eight"]
    assert notes[-1].startswith("left out: line 2: the question is also in another row, and only one of the rows has")


def test_cells_that_mean_no_answer(written):
    """The passage contains the two characters of an empty list, and the name of the column has capitals."""
    path = written(
        "context,question,answer,Is_Impossible\nx = [],One?,[],\nx = [],Two?,,TRUE\nx = [],Three?,x,\n", "t.csv"
    )
    questions, *_ = read_file(path)
    assert [row["answers"] for row in questions] == [[UNANSWERABLE], [UNANSWERABLE], ["x"]]


def places(unusable: list[str]) -> list[str]:
    return [row.partition(": ")[0] for row in unusable]


def test_a_quote_that_is_not_closed_costs_only_its_own_row(written):
    """A TSV file is often written without quotes, so that a quote is a part of the text."""
    rows = [f'{CONTEXT} "{number}"\tHow many?\teight' for number in range(180)]
    for broken in (0, 20, 179):
        content = ["context\tquestion\tanswer", *rows]
        content[broken + 1] = f'"{content[broken + 1]}'
        questions, _, unusable, _ = read_file(written("\n".join(content), "t.tsv"), skip=True)
        assert (len(questions), places(unusable)) == (179, [f"row {broken + 2}"])


def test_a_torn_row_among_rows_of_several_lines_is_refused(written, refusal):
    """Its last line has as many cells as a row, and would be one with a wrong passage."""
    torn = f'"First line\n{CONTEXT},"How many?","eight"\n'
    path = written(f'{NAMES}{torn}"{CONTEXT}\nMore.","How many?","eight"\n"{CONTEXT}",Why?,eight\n', "t.csv")
    line = refusal(lambda: read_file(path, skip=True))
    assert line.startswith(f"error: {path}: row 2: a quotation mark is not closed, so it is")


def test_a_passage_of_several_lines_stays_whole(written):
    path = written(f'{NAMES}"{CONTEXT}\r\n\n""{CONTEXT}"", {CONTEXT}",How many?,eight\n', "t.csv")
    (question,), *_ = read_file(path)
    assert question["context"] == f'{CONTEXT}\r\n\n"{CONTEXT}", {CONTEXT}'


def test_a_separator_of_lines_stays_in_its_text(written):
    separator = "before\u2028after"
    (question,), *_ = read_file(
        written(json.dumps(ROW | {"context": f"{separator} eight"}, ensure_ascii=False), "t.jsonl")
    )
    assert separator in question["context"]


def spoil(row: str, kind: str) -> str:
    """Return a row of a CSV file with a fault of this kind."""
    first, question, answer = row[1:-1].split('","')
    return {
        "opened quote": f'"{first},{question},{answer}',
        "missing quote": f'"{first},"{question}","{answer}"',
        "quote in a cell": f'"{first}" x,"{question}","{answer}"',
        "missing cell": f'"{first}","{question}"',
        "unquoted comma": f"{first}, and more,{question},{answer}",
        "wrong answer": f'"{first}","{question}","nowhere"',
        "empty answer": f'"{first}","{question}",""',
        "line end": f'"{first}\n{first}","{question}","nowhere"',
        "empty row": ",,",
        "blank line": "",
    }[kind]


TORN = ("opened quote", "missing quote", "quote in a cell")
KINDS = ("missing cell", "unquoted comma", "wrong answer", "empty answer", "empty row", "blank line")


@pytest.mark.promise("your own model and data: from a table to a model that answers")
@pytest.mark.parametrize("seed", range(20))
def test_random_faults_lose_no_row(written, seed):
    """All other rows of the table are used, and each row with a fault is named with its own number."""
    draw = random.Random(seed)
    rows = [f'"{CONTEXT} {number}, {number}","Question {number}?","eight"' for number in range(200)]
    kinds = [*KINDS, *(TORN if seed % 2 else ["line end"])]  # a file with both is refused
    faulty = {place: draw.choice(kinds) for place in draw.sample(range(200), 25)}
    content = [spoil(row, faulty[place]) if place in faulty else row for place, row in enumerate(rows)]
    questions, notes, unusable, _ = read_file(written(NAMES + "\n".join(content) + "\n", "t.csv"), skip=True)
    good = {f"Question {place}?" for place in range(200) if place not in faulty}
    assert {row["question"] for row in questions} == good
    named = [f"row {place + 2}" for place in sorted(faulty) if faulty[place] not in ("empty row", "blank line")]
    assert places(unusable) == named
    assert notes[1] == f"rows of t.csv: 175 used, {len(named)} left out, {25 - len(named)} empty"


# Files that are refused

REFUSED = {
    "not UTF-8": ("t.csv", f"{NAMES}Zürich,,".encode("latin-1"), None, "t.csv: is not UTF-8 ("),
    "a truncated UTF-16": ("t.csv", NAMES.encode("utf-16")[:-1], None, "t.csv: is not UTF-8 ('utf-16"),
    "a spreadsheet": (
        "t.xlsx",
        b"PK\x03\x04\x14\x00\xff",
        None,
        "t.xlsx: is a workbook (.xlsx, .ods) or a zip file; export the sheet as CSV (UTF-8), or",
    ),
    "an old spreadsheet": (
        "t.xls",
        b"\xd0\xcf\x11\xe0",
        None,
        "t.xls: is an old or encrypted Office file, such as .xls; ",
    ),
    "parquet by another name": (
        "t.csv",
        b"PAR1\x15\xff",
        None,
        "t.csv: is a parquet file; convert it: pandas.read_",
    ),
    "gzip": ("t.jsonl.gz", b"\x1f\x8b\x08\x00", None, "t.jsonl.gz: is a gzip file; unpack it with gunzip"),
    "a PDF file": ("t.json", b"%PDF-1.7\n%\xe2\xe3", None, "t.json: is a PDF file; save its text (UTF-8)"),
    "no rows": (
        "t.csv",
        NAMES,
        None,
        "t.csv: has no rows; see data/README.md",
    ),
    "nothing": ("t.csv", "", None, "t.csv: has no questions; see data/README.md"),
    "a mistyped column": (
        "t.jsonl",
        lines(ROW),
        "context,question,anser",
        "TABLE_COLUMNS: t.jsonl has no column 'anser'; did you mean answer?",
    ),
    "two columns of one name": (
        "t.csv",
        "answer,context,question,answer\n",
        None,
        "t.csv: two columns have the name answer",
    ),
    "unusual columns": (
        "t.csv",
        "a,b\n1,2\n",
        None,
        "t.csv: its columns (a, b) are those of no kind of data: chat (messages",
    ),
    "unquoted commas": (
        "t.csv",
        f"{NAMES}a, b,c,d\n",
        None,
        "t.csv: 1 of 1 rows cannot be used: row 2: 4 cells, but the f",
    ),
}


@pytest.mark.parametrize(("name", "content", "columns", "error"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_read_is_one_error_line(written, refusal, name, content, columns, error):
    assert refusal(read_file, written(content, name), columns).startswith(f"error: {error}")
