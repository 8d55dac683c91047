"""SQuAD files: the README describes the bundled file correctly, and messages give the place of an error in a file."""

import json
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest

import data_loader
from config import DataArguments
from data_loader import UNANSWERABLE, load_from_hub, load_squad, read_part, read_questions
from helpers import REPOSITORY
from shared import hub

README = (REPOSITORY / "data" / "README.md").read_text()
CONTEXT = "Nodes talk over a fast network. Each node holds eight devices."


@contextmanager
def first(local: bool, desc: str):
    yield


def training(seed: int = 42, data_seed: int | None = None) -> SimpleNamespace:
    return SimpleNamespace(seed=seed, data_seed=data_seed, world_size=1, main_process_first=first)


def question(identifier: str = "q", text: str = "fast network", **other: object) -> dict:
    answers = [{"text": text, "answer_start": CONTEXT.index(text)}]
    return {"id": identifier, "question": "What is it?", "answers": answers} | other


def squad(*questions: dict, context: str = CONTEXT) -> dict:
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}


@pytest.fixture
def written(tmp_path):
    def write(content: dict | str) -> str:
        path = tmp_path / "my.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def read(path: str | Path, part: str = "all") -> list[dict]:
    return list(read_questions(str(path), part))


# The bundled sample


def test_the_readme_gives_the_right_counts_of_the_sample(sample):
    questions = read(sample)
    content = json.loads(sample.read_text())
    paragraphs = [paragraph for article in content["data"] for paragraph in article["paragraphs"]]
    answers = sum(len(question["answers"]) for question in questions)
    counted = (len(content["data"]), len(paragraphs), len(questions), answers, sample.stat().st_size)
    row = re.search(r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) bytes \|", README)
    assert tuple(map(int, row.groups())) == counted
    assert len({question["id"] for question in questions}) == len(questions)


def test_the_format_that_the_readme_shows_is_read(written):
    example = re.search(r"```json\n(.*?)```", README, re.DOTALL)[1]
    assert [q["answers"] for q in read(written(example))] == [["a fast network"], [UNANSWERABLE]]


# A user's file


FAULTS = {
    "truncated": ('{"data": [{"paragraphs": [', ": Expecting value: line 1 column 27 (char 26); is the file complete?"),
    "no paragraphs": ({"data": [{}]}, ": data[0].paragraphs: is missing, expected a list; see data/README.md for the"),
    "blank context": (squad(question(), context=" "), ": data[0].paragraphs[0].context: is ' ', expected a text"),
    "answers as the Hub has them": (
        squad(question(answers={"text": ["fast"]})),
        ": data[0].paragraphs[0].qas[0].answers: is {'text': ['fast']}, expected a list",
    ),
    "no answer": (
        squad(question(answers=[])),
        ": data[0].paragraphs[0].qas[0].answers: is empty; give an answer, or set is_impossible to true",
    ),
    "wrong offset, at the end": (
        squad(*map(question, "abc"), question(answers=[{"text": "fast", "answer_start": 3}])),
        ": data[0].paragraphs[0].qas[3].answers[0]: 'fast' is not at character 3 of its context; correct answer_start",
    ),
    "one paragraph": (squad(question()), ": no question in its held out paragraphs; give --eval_dataset, or a file"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_bad_file_is_refused_with_the_place_of_the_fault(fault, written, refusal):
    content, beginning = FAULTS[fault]
    path = written(content)
    assert refusal(read_part, "eval", DataArguments(dataset=path)).startswith(f"error: {path}{beginning}")


def test_a_path_without_a_file_is_refused(tmp_path, refusal):
    def line(dataset: str, eval_dataset: str | None = None) -> str:
        return refusal(read_part, "eval", DataArguments(dataset=dataset, eval_dataset=eval_dataset))

    assert line("gone.json") == "error: gone.json: there is no such file; correct --dataset"
    assert line("./gone") == "error: ./gone: there is no such file; correct --dataset"
    assert line(str(tmp_path)).startswith(f"error: {tmp_path}: Is a directory; check the path")
    assert line("squad", "gone.json").startswith("error: gone.json: No such file or directory; check the path")


def test_all_reference_answers_are_kept_and_offsets_count_characters(written):
    context = "Der Rechner heißt Zürich-1 und läuft."
    answers = [{"text": t, "answer_start": context.index(t)} for t in ("Zürich-1", "läuft")]
    path = written(squad(question(answers=answers), context=context))
    assert read(path)[0]["answers"] == ["Zürich-1", "läuft"]


def test_a_file_in_the_users_home_is_read_again_after_a_change(written, tiny_tokenizer, tmp_path, monkeypatch):
    """A site file can set a path with ~, which no shell expands."""
    monkeypatch.setenv("HOME", str(tmp_path))
    arguments = DataArguments(dataset="~/my.json", eval_dataset="~/my.json", train_size=1, eval_size=1)
    for identifier, answer in (("before", "fast network"), ("after", "eight devices")):
        written(squad(question(identifier, answer)))
        row = load_squad(arguments, tiny_tokenizer, training())[0][0]
        assert (row["id"], row["answers"]) == (identifier, [answer])


# Subsets


def test_held_out_paragraphs_are_every_fifth_and_never_trained_on(sample):
    train, held_out = (read(sample, part) for part in ("train", "held out"))
    assert not {q["context"] for q in train} & {q["context"] for q in held_out}
    assert len(train) + len(held_out) == len(read(sample))
    contexts = list(dict.fromkeys(q["context"] for q in read(sample)))
    assert list(dict.fromkeys(q["context"] for q in held_out)) == contexts[4::5]


def test_subsets_depend_only_on_the_seed(sample, tiny_tokenizer):
    def ids(train_size: int = 40, **seeds: int) -> tuple[list, list]:
        arguments = DataArguments(dataset=str(sample), train_size=train_size, eval_size=20, max_length=200)
        train, evaluation = load_squad(arguments, tiny_tokenizer, training(**seeds))
        return train["id"][:], evaluation["id"][:]

    one, other = ids(seed=1), ids(seed=2)
    assert set(one[0]) != set(other[0])
    assert one[1] != other[1]
    assert ids(seed=1) == ids(seed=2, data_seed=1) == one
    assert ids(10, seed=1) == (one[0][:10], one[1])


# The Hub. tests/integration/test_offline.py loads squad from the Hub, and tests runs without network and cache


def test_a_hub_dataset_that_is_not_squad_is_refused(monkeypatch, refusal):
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))
    films = datasets.Dataset.from_dict({"text": ["a film"]})
    monkeypatch.setattr(data_loader, "load_dataset", lambda name, split: films)
    assert refusal(load_from_hub, "imdb", "train").startswith("error: --dataset: imdb cannot be loaded (")
