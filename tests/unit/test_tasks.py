"""Tests of scripts/tasks: each kind of data is recognised, read, turned into tokens, held out, and no row is lost."""

import re
from types import SimpleNamespace

import pytest
from datasets import Dataset, DatasetDict

import data_loader
import tasks
from config import IGNORED, DataArguments
from data_loader import load_data, load_set, read_part
from estimate_memory import count_questions
from helpers import REPOSITORY
from model import load_tokenizer
from read_questions import read_file
from settings.command_line import parse_command_line
from shared import hub
from tasks import task_of
from tasks.task import Columns, Task, read_text, token_row
from test_data import training

CONTEXT = "Nodes send over a fast network."
PAIR = {"prompt": "The sky is", "completion": " blue."}
TALK = [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "A model."}]
WORDS = ["the", "node", "sends", "a", "message", "to", "all", "other", "ranks", "of", "its", "group", "and", "waits"]


# 1. Which kind

KINDS = {
    "messages": (
        {"messages": TALK, "prompt": "Who?", "text": "x"},
        None,
        "messages (kind: chat); not used: prompt, text",
    ),
    "Alpaca": (
        {"instruction": "Add.", "input": "1, 2", "output": "3", "text": "all of it"},
        None,
        "instruction, input, output (kind: chat); not used: text",
    ),
    "ShareGPT": (
        {"conversations": [{"from": "human", "value": "Who?"}, {"from": "gpt", "value": "A model."}]},
        None,
        "conversations (kind: chat)",
    ),
    "lists of messages": ({"prompt": TALK[:1], "completion": TALK[1:]}, None, "prompt, completion (kind: chat)"),
    "a question without a passage": (
        {"id": 1, "Question": "Who?", "Answer": "A model."},
        None,
        "Question, Answer (kind: chat)",
    ),
    "a table that 2.0.0 reads": (
        {"text": CONTEXT, "prompt": "Over what?", "completion": "a fast network", "lang": "en"},
        None,
        "text, prompt, completion (kind: passage); not used: lang",
    ),
    "an instruction about a passage": (
        {"context": CONTEXT, "instruction": "Over what?", "output": "network"},
        None,
        "context, instruction, output (kind: passage)",
    ),
    "prompt and completion": (PAIR, None, "prompt, completion (kind: completion)"),
    "text": ({"text": CONTEXT, "label": 3}, None, "text (kind: text); not used: label"),
    "one column of texts": ({"body": CONTEXT, "title": "t"}, "body", "body (kind: text); not used: title"),
    "one column of lists": ({"talk": TALK}, "talk", "talk (kind: chat)"),
    "two columns": ({"ask": "The sky is", "reply": " blue."}, "ask, reply", "ask, reply (kind: completion)"),
    "three columns": ({"p": CONTEXT, "q": "Over what?", "a": "network"}, "p,q,a", "p, q, a (kind: passage)"),
}


@pytest.mark.parametrize(("row", "columns", "line"), KINDS.values(), ids=KINDS)
def test_the_log_says_which_kind_was_recognised_from_which_columns(row, columns, line, written):
    reading = read_file(written([row]), columns)
    assert reading.notes == [f"columns of t.jsonl: {line}"]
    assert task_of(list(reading.examples[0])).name == re.search(r"kind: (\w+)", line)[1]


def test_each_example_of_the_page_has_the_kind_that_the_page_says(written):
    page = (REPOSITORY / "data" / "README.md").read_text(encoding="utf-8").partition("## From the file")[0]
    (table, squad, *blocks) = re.findall(r"^```(?:json|text)\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    rows = enumerate("".join(blocks).splitlines())
    files = [written(table, "t.csv"), written(squad, "squad.json"), *(written(row, f"{i}.jsonl") for i, row in rows)]
    kinds = [task_of(list(read_file(path).examples[0])).name for path in files]
    assert kinds == ["passage", "passage", "completion", *["chat"] * 5, "text"]


def test_answers_that_are_not_a_part_of_the_passage_need_a_knob(written, refusal):
    path = written([{"context": CONTEXT, "question": "Over what?", "answer": "Over a quick net."}])
    assert "correct them, give ANSWERS=free to allow such answers, or leave" in refusal(read_file, path)
    assert read_file(path, free=True).examples[0]["answers"] == ["Over a quick net."]


def test_a_fifth_kind_is_one_task(written, tiny_tokenizer, monkeypatch):
    def encode(example: dict, tokenizer: object, max_length: int, labels: str) -> list[dict]:
        ids = tokenizer(example["song"])["input_ids"][:max_length]
        return [token_row(ids, [True] * len(ids), 0)]

    fifth = Task(
        name="song",
        columns="song",
        rows="songs",
        column="song",
        choose=lambda names, cells: Columns("song") if "song" in names else None,
        read=lambda cells, columns, place: {"id": place, "answers": [], "song": read_text(cells, columns.first)},
        encode=encode,
        ask=lambda question, context: {"song": question},
        prompt=lambda example, room, tokenizer: tokenizer(example["song"])["input_ids"][-room:],
        texts=lambda example: [example["song"]],
    )
    monkeypatch.setattr(tasks, "TASKS", (*tasks.TASKS, fifth))
    path = written([{"song": f"la {i}"} for i in range(10)])
    train, evaluation, _ = load_data(DataArguments(dataset=path), tiny_tokenizer, training())
    assert sorted(train["song"]) == [f"la {i}" for i in range(10) if i % 5 != 4]
    assert sorted(evaluation["song"]) == ["la 4", "la 9"]


# 2. Several files, folders and the Hub


def test_a_folder_and_a_list_are_all_their_files_in_order(written, refusal, tiny_tokenizer, capsys):
    for name in ("b.jsonl", "a.jsonl"):
        written([{"prompt": name, "completion": "x"}] * 3, f"data/{name}")
    for dataset in ("./data", "data/", "data/b.jsonl, data/a.jsonl"):
        examples = read_part("train", DataArguments(dataset=dataset, eval_dataset="data/a.jsonl")).rows
        assert examples["prompt"][:] == ["a.jsonl"] * 3 + ["b.jsonl"] * 3
    assert data_loader.find_files("data") == [], "a name on the Hub"
    assert written([PAIR], "one, two.jsonl") == data_loader.find_files("one, two.jsonl")[0]
    written("A text.", "data/c.txt")
    short = DataArguments(dataset="data/c.txt", table_columns="text", max_length=64)
    line = refusal(load_data, short, tiny_tokenizer, training())
    assert line.startswith("error: data/c.txt: has only 1 different 64-token pieces, and every fifth one is held out")
    assert "TABLE_COLUMNS has no effect on data/c.txt, which is not a table\n" in capsys.readouterr().out
    other = DataArguments(dataset="data/b.jsonl", eval_dataset="data/c.txt", max_length=64)
    line = refusal(load_data, other, tiny_tokenizer, training())
    assert line.startswith("error: --eval_dataset: has the kind text, but --dataset has the kind completion; give data")
    line = refusal(read_part, "train", DataArguments(dataset="data/"))
    assert (
        line
        == "error: data/: data/b.jsonl has the kind completion, data/c.txt has the kind text; give files of one kind"
    )
    assert refusal(read_part, "train", DataArguments(dataset="a.txt,squad")).startswith(
        "error: a.txt: there is no such"
    )
    assert refusal(read_part, "train", DataArguments(dataset="data/b.jsonl,squad")).startswith("error: squad: No such")


def test_the_hub_has_all_kinds_and_rows_are_held_out_without_a_validation_split(monkeypatch, tiny_tokenizer):
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    pairs = Dataset.from_list([{"prompt": f"Question {i}?", "completion": " word"} for i in range(10)])
    splits = DatasetDict(train=pairs)
    monkeypatch.setattr(data_loader, "load_dataset", lambda name: splits)

    def prompts() -> list[list[str]]:
        loaded = load_data(DataArguments(dataset="us/pairs"), tiny_tokenizer, training())
        return [sorted(part["prompt"]) for part in loaded[:2]]

    all_prompts = pairs["prompt"][:]
    assert prompts() == [[each for each in all_prompts if each[9] not in "49"], ["Question 4?", "Question 9?"]]
    splits["validation"] = pairs.select([0])
    assert prompts() == [all_prompts, ["Question 0?"]]


# 3. Tokens


def test_a_prompt_loses_its_beginning_and_a_completion_nothing(written, tiny_tokenizer, refusal):
    rows = [PAIR, {"prompt": " ".join(WORDS * 20), "completion": " the end"}, {"prompt": "x", "completion": " a" * 64}]
    data = DataArguments(dataset=written(rows), eval_dataset="t.jsonl", max_length=64, train_size=3, bad_rows="skip")
    encoded, _, left_out = load_data(data, tiny_tokenizer, training())
    assert left_out == ["t.jsonl: line 3: the completion has 64 tokens, so no prompt fits into --max_length"]
    for row in encoded:
        length = row["prompt_length"]
        assert row["labels"] == [IGNORED] * length + row["input_ids"][length:]
        whole = row["prompt"] + row["completion"]
        tokens = tiny_tokenizer(whole)["input_ids"] + [tiny_tokenizer.eos_token_id]
        assert (row["input_ids"], row["cut"]) == (tokens[-64:], len(tokens) > 64)
        assert task_of(encoded.column_names).prompt(row, length, tiny_tokenizer) == row["input_ids"][:length]
    strict = DataArguments(dataset="t.jsonl", eval_dataset="t.jsonl", max_length=64)
    assert refusal(load_data, strict, tiny_tokenizer, training()).startswith(
        "error: t.jsonl: 1 of 3 rows cannot be used"
    )


@pytest.mark.parametrize("documents", [1, 5])
def test_a_text_is_cut_into_pieces_and_sizes_count_pieces(documents, written, tiny_tokenizer):
    """A document of 10 x 32 tokens and EOS, which would be alone in the last piece."""
    for i in range(documents):
        text = tiny_tokenizer.decode(tiny_tokenizer(" ".join(WORDS * 50))["input_ids"][i : i + 32 * 10])
        assert len(tiny_tokenizer(text)["input_ids"]) == 32 * 10
        written(text, f"data/{i}.md")
    data = DataArguments(dataset="./data", max_length=32)
    train, evaluation, _ = load_data(data, tiny_tokenizer, training())
    assert (len(train), len(evaluation)) == ((9, 2) if documents == 1 else (44, 11))
    pieces = sorted([*train["input_ids"], *evaluation["input_ids"]], key=len)
    assert [len(piece) for piece in pieces] == [2] * documents + [31] * documents + [32] * 9 * documents
    assert sum(piece.count(tiny_tokenizer.eos_token_id) for piece in pieces) == documents
    assert train["labels"][:] == train["input_ids"][:]
    settings = parse_command_line("", ["--model_name", "tiny-bloom", "--dataset", "./data", "--max_length", "32"])
    own = load_tokenizer(settings.model, settings.data)
    assert count_questions(settings) == len(load_data(settings.data, own, training())[0])
    assert (
        len(load_data(DataArguments(dataset="./data", max_length=32, train_size=3), tiny_tokenizer, training())[0]) == 3
    )


@pytest.mark.parametrize(
    ("name", "value", "off"), [("labels", "answer", "sequence"), ("em_f1", True, False), ("show", 2, 0)]
)
def test_a_text_has_no_answers(name, value, off, written, tiny_tokenizer, refusal):
    data = DataArguments(dataset=written([{"text": f"{CONTEXT} {i}"} for i in range(5)]), **{name: value})
    line = refusal(load_set, "eval", None, data, tiny_tokenizer, training())
    assert line == f"error: {name.upper()}: needs answers, but t.jsonl has the kind text; set {name.upper()}={off}"
