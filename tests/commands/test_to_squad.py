"""Tests of to_squad.py: a table becomes a file that train.py reads, and each unusable row is listed with its reason."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from data_loader import UNANSWERABLE, read_questions
from helpers import REPOSITORY

CONTEXT = "Nodes send over a fast network. Each node holds eight GPUs."
ROW = {"context": CONTEXT, "question": "How many?", "answer": "eight"}


@pytest.fixture
def convert(tmp_path):
    """Convert a table with this content. Return the finished command and the questions of its file, if it wrote one."""

    def run(name: str, content: str | bytes, *flags: str) -> tuple[subprocess.CompletedProcess, list[dict]]:
        table, output = tmp_path / name, tmp_path / "my.json"
        table.write_bytes(content if isinstance(content, bytes) else content.encode())
        output.unlink(missing_ok=True)
        done = subprocess.run(
            [sys.executable, REPOSITORY / "scripts/to_squad.py", name, "my.json", *flags],
            cwd=tmp_path,
            capture_output=True,
            text=True,
        )
        assert (done.returncode == 0) == output.exists(), done
        assert "Traceback" not in done.stderr
        return done, list(read_questions(str(output))) if output.exists() else []

    return run


def lines(*rows: object) -> str:
    return "".join(row + "\n" if isinstance(row, str) else json.dumps(row) + "\n" for row in rows)


# Formats of tables

TABLES = {
    "commas": ("t.csv", f'context,question,answer\n"{CONTEXT}",How many?,eight\n'),
    "a byte order mark and semicolons": ("t.csv", f"\ufeffContext;Question;Answer\n{CONTEXT};How many?;eight\n"),
    "tabs": ("t.tsv", f"passage\tquery\tlabel\r\n{CONTEXT}\tHow many?\teight\r\n"),
    "JSON Lines": ("t.jsonl", lines(ROW)),
    "JSON Lines by another name": ("t.json", lines(ROW, ROW)),
    "a JSON list": ("t.json", json.dumps([ROW], indent=2)),
    "rows of the Hub": ("t.json", json.dumps({"data": [ROW | {"answer": {"text": ["eight"], "answer_start": [49]}}]})),
}


@pytest.mark.parametrize(("name", "content"), TABLES.values(), ids=TABLES)
def test_a_table_becomes_questions(convert, name, content):
    done, (question,) = convert(name, content)
    assert done.returncode == 0, done
    assert (question["context"], question["question"], question["answers"]) == (CONTEXT, "How many?", ["eight"])
    assert "\nmy.json: 1 questions about 1 passages\n" in done.stdout


def test_several_answers_and_no_answer(convert):
    rows = [
        ROW | {"id": 7, "answer": ["eight", "eight GPUs", "eight"]},
        ROW | {"question": "Over what?", "answer": '["a fast network", "network"]'},  # a cell of a CSV file
        ROW | {"question": "Twice?", "answer": "Nodes"},
        ROW | {"question": "Twice?", "answer": "node"},
        ROW | {"question": "Who?", "answer": []},
        ROW | {"question": "When?", "is_impossible": "True"},
    ]
    done, questions = convert("t.json", json.dumps(rows))
    assert done.returncode == 0, done
    assert [row["id"] for row in questions] == ["7", "row-2", "row-3", "row-5", "row-6"]
    expected = [["eight", "eight GPUs"], ["a fast network", "network"], ["Nodes", "node"]]
    assert [row["answers"] for row in questions] == [*expected, [UNANSWERABLE], [UNANSWERABLE]]
    columns = ("--context", "text", "--question", "q", "--answer", "a1", "a2", "--unanswerable")
    done, questions = convert("t.csv", f"text,q,a1,a2\n{CONTEXT},How many?,eight,GPUs\n{CONTEXT},Who?,,\n", *columns)
    assert [row["answers"] for row in questions] == [["eight", "GPUs"], [UNANSWERABLE]]


# Rows that cannot be used

FAULTS = {
    "context is empty": [ROW | {"context": ""}, ROW | {"context": None}, ROW | {"context": " \n"}],
    "context is not a text: 3": [ROW | {"context": 3}],
    "context is not a text: ['": [ROW | {"context": [CONTEXT]}],
    "question is empty": [ROW | {"question": " "}, {"context": CONTEXT, "answer": "eight"}],
    "question is not a text: {": [ROW | {"question": {"text": "How many?"}}],
    "the answer is empty (--unanswerable": [ROW | {"answer": ""}, ROW | {"answer": None}, ROW | {"answer": "  "}],
    "the passage does not contain the answer 'nine'": [ROW | {"answer": "nine"}, ROW | {"answer": ["eight", "nine"]}],
    "the passage does not contain the answer 'EIGHT', only 'eight'": [ROW | {"answer": "EIGHT"}],
    "the passage does not contain the answer '8'": [ROW | {"answer": 8}, ROW | {"answer": {"text": ["8"]}}],
    "the answer is not a text: True": [ROW | {"answer": True}],
    "the answer is not a text: [": [ROW | {"answer": [["eight"]]}],
    "is not an object with columns": [3, None, ["eight"]],
    "is not JSON (": ['{"context": "cut', "no JSON", "{'context': 'quotes of Python'}"],
}


def test_each_unusable_row_is_listed_and_left_out_on_request(convert):
    faulty = [(reason, row) for reason, rows in FAULTS.items() for row in rows]
    assert len(faulty) > 20
    good = [ROW | {"question": f"Question {number}?"} for number in range(200 - len(faulty))]
    content = lines(*good[:100], *(row for _, row in faulty), *good[100:])
    done, _ = convert("t.jsonl", content)
    assert done.returncode == 2
    what = f"error: t.jsonl: {len(faulty)} rows cannot be used; correct them, or leave them out with --skip\n"
    assert done.stderr == what
    assert f"{len(faulty)} of 200 rows cannot be used:\n" in done.stdout
    listed = [line for line in done.stdout.splitlines() if line.startswith("  ")]
    for number, ((reason, _), line) in enumerate(zip(faulty, listed, strict=True), 101):
        assert line.startswith(f"  line {number}: {reason}")
    done, questions = convert("t.jsonl", content, "--skip")
    assert done.returncode == 0, done
    assert [row["question"] for row in questions] == [row["question"] for row in good]


def test_faults_of_a_csv_file(convert):
    rows = [f"{CONTEXT},How many?,eight", f"{CONTEXT},short", f"{CONTEXT},long,eight,8", '"a"b,c,d', "", '"open,c,d']
    done, _ = convert("t.csv", "\n".join(["context,question,answer", *rows]))
    assert [line.partition("(")[0].strip() for line in done.stdout.splitlines()[2:]] == [
        "row 3: the answer is empty",
        "row 4: 4 cells, but the first line has 3",
        "row 5: wrong quotes",
        "row 7: wrong quotes",
    ], done


# Files that are not tables

REFUSED = {
    "not UTF-8": ("t.csv", "context,question,answer\nZürich,,".encode("latin-1"), (), "t.csv: is not UTF-8 ("),
    "another format": ("t.xlsx", "PK", (), "t.xlsx: its name says neither CSV, TSV nor JSON; save it as .csv, .tsv"),
    "no rows": ("t.csv", "context,question,answer\n", (), "t.csv: has no rows; give a table with a first line of"),
    "a SQuAD file": ("t.json", '{"data": [{"paragraphs": []}]}', (), "t.json: is a SQuAD file already; give it to"),
    "a mistyped column": ("t.jsonl", lines(ROW), ("--answer", "anser"), "--answer: t.jsonl has no column anser; did"),
    "unusual columns": (
        "t.csv",
        "a,b\n1,2\n",
        (),
        "t.csv: none of its columns (a, b) has a usual name for the context and the q",
    ),
    "no usable row": ("t.jsonl", lines(ROW | {"answer": "x"}), ("--skip",), "t.jsonl: no row can be used; see the"),
    "no such file": ("t.csv", "", ("--context", "x"), "t.csv: has no rows;"),
}


@pytest.mark.parametrize(("name", "content", "flags", "error"), REFUSED.values(), ids=REFUSED)
def test_a_file_that_cannot_be_converted_is_one_error_line(convert, name, content, flags, error):
    done, _ = convert(name, content, *flags)
    assert done.returncode == 2
    assert done.stderr.startswith(f"error: {error}")
    assert done.stderr.count("\n") == 1


def test_an_existing_file_is_not_overwritten(tmp_path: Path):
    path = tmp_path / "my.json"
    path.write_text("precious")
    words = [sys.executable, REPOSITORY / "scripts/to_squad.py", "gone.csv", path]
    done = subprocess.run(words, capture_output=True, text=True)
    assert done.stderr == f"error: {path}: already exists; give another name, or remove it\n"
    assert path.read_text() == "precious"
