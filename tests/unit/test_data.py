"""SQuAD files: messages give the place of an error in a file, and sizes and seeds choose the questions."""

import copy
import inspect
import sys
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import datasets
import pytest
from tokenizers.processors import TemplateProcessing

import data_loader
from config import IGNORED, DataArguments
from data_loader import (
    load_data,
    read_part,
    resolve_size,
    tokenise_batch,
    tokens_hash,
)
from read_questions import read_file

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


def read(path: str | Path, part: str = "all") -> list[dict]:
    if part == "all":
        return read_file(str(path)).examples
    return list(read_part({"train": "train", "held out": "eval"}[part], DataArguments(dataset=str(path))).rows)


# A user's file


ONE = ": 1 of 1 questions cannot be used: data[0].paragraphs[0].qas[0]: "
FAULTS = {
    "truncated": ('{"data": [{"paragraphs": [', ": Expecting value: line 1 column 27 (char 26); is the file complete?"),
    "not UTF-8": (
        b'{"data": "Z\xfcrich"}',
        ": is not UTF-8 ('utf-8' codec can't decode byte 0xfc in position 11: invalid start byte); convert it to",
    ),
    "no paragraphs": ({"data": [{"paragraphs": 3}]}, ": data[0].paragraphs: is 3, expected a list; see data/README.md"),
    "blank context": (squad(question(), context=" "), f"{ONE}context is empty; correct them, or leave them out with"),
    "no answer": (
        squad(question(answers=[])),
        f"{ONE}the answer is empty (if the passage does not answer the question",
    ),
    "a text instead of true or false": (
        squad(question(is_impossible="false")),
        f"{ONE}is_impossible is 'false', expected true or false; correct",
    ),
    "an answer to an impossible question": (
        squad(question(is_impossible=True)),
        f"{ONE}is_impossible is true, but there is an answer; correct",
    ),
    "wrong offsets": (
        squad(*map(question, "abc"), *[question(answers=[{"text": "fast", "answer_start": 3}])] * 12),
        ": 12 of 15 questions cannot be used: "
        + ", ".join(
            f"data[0].paragraphs[0].qas[{q}]: the answer 'fast' is not at answer_start 3, which counts characters from "
            "0"
            for q in range(3, 13)
        )
        + " and 2 more; correct them",
    ),
    "one passage": (
        squad(question()),
        ": has only 1 different passages, and every fifth one is held out for the evaluation; give --eval_dataset, or",
    ),
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
    assert line(str(tmp_path)).startswith(f"error: {tmp_path}: no file in it ends with .json, ")
    assert line("squad", "gone.json").startswith("error: gone.json: there is no such file; ")


def test_all_answers_are_kept_offsets_count_characters_and_questions_need_no_ids(written):
    context = "Der Rechner heißt Zürich-1 und läuft."
    answers = [{"text": t, "answer_start": context.index(t)} for t in ("Zürich-1", "läuft")]
    asked = question(7, answers=answers, is_impossible=False)
    rows = read(written(squad(asked, {name: asked[name] for name in ("question", "answers")}, context=context)))
    assert [row["answers"] for row in rows] == [["Zürich-1", "läuft"]] * 2
    assert [row["id"] for row in rows] == ["7", "data[0].paragraphs[0].qas[1]"]


def test_a_file_in_the_users_home_is_read_again_after_a_change(written, tiny_tokenizer, monkeypatch):
    """A site file can set a path with ~, which no shell expands."""
    monkeypatch.setenv("HOME", str(Path.cwd()))
    arguments = DataArguments(dataset="~/my.json", eval_dataset="~/my.json", train_size=1, eval_size=1)
    for identifier, answer in (("before", "fast network"), ("after", "eight devices")):
        written(squad(question(identifier, answer)))
        row = load_data(arguments, tiny_tokenizer, training())[0][0]
        assert (row["id"], row["answers"]) == (identifier, [answer])


# Subsets


def test_held_out_paragraphs_are_every_fifth_and_never_trained_on(sample):
    train, held_out = (read(sample, part) for part in ("train", "held out"))
    assert not {q["context"] for q in train} & {q["context"] for q in held_out}
    assert len(train) + len(held_out) == len(read(sample))
    contexts = list(dict.fromkeys(q["context"] for q in read(sample)))
    assert list(dict.fromkeys(q["context"] for q in held_out)) == contexts[4::5]


@pytest.mark.promise("your own model and data: from a table to a model that answers")
def test_a_passage_in_several_paragraphs_is_either_trained_on_or_held_out(written):
    """Tables often have one row, and so one paragraph, per question."""
    rows = [{"context": f"{CONTEXT} {passage}", "qas": [question()]} for passage in range(5) for _ in range(3)]
    path = written({"data": [{"paragraphs": rows}]})
    contexts = {part: [row["context"] for row in read(path, part)] for part in ("train", "held out")}
    assert (len(contexts["train"]), contexts["held out"]) == (12, [f"{CONTEXT} 4"] * 3)


def test_sizes(sample, tiny_tokenizer, capsys):
    """All questions of a local file are used unless sizes are given. tests/faults has sizes that are too large."""

    def sizes(**options: object) -> tuple[int, ...]:
        arguments = DataArguments(dataset=str(sample), max_length=256, **options)
        return tuple(map(len, load_data(arguments, tiny_tokenizer, training())[:2]))

    assert sizes() == sizes(train_size="all", eval_size="all", samples_per_gpu=None) == (280, 67)
    assert sizes(train_size=3, eval_size="all") == (3, 67)
    assert capsys.readouterr().out.endswith(
        f"training questions: 3 of 280 available in {sample}\nevaluation questions: 67 of 67 available in {sample}\n"
    )
    assert [resolve_size(part, None, 600, "squad") for part in ("train", "eval")] == [500, 100]
    assert [resolve_size(part, "all", 600, "squad") for part in ("train", "eval")] == [600, 600]


def test_the_log_counts_lost_answers_and_known_passages(sample, tiny_tokenizer, capsys):
    """By answer_start, 174 answers are in the part that was cut off. 4 of these texts are also in the other part."""
    options = {"dataset": str(sample), "eval_dataset": str(sample), "max_length": 128, "eval_size": 9}
    _, evaluation, _ = load_data(DataArguments(**options), tiny_tokenizer, training())
    lost = sum(evaluation["answer_cut"])
    out = capsys.readouterr().out
    assert "\n347 of 347 training questions were cut to --max_length; 170 lost their answer\n" in out
    assert f"\n9 of 9 evaluation questions were cut to --max_length; {lost} lost their answer\n" in out
    assert out.endswith("\n9 of 9 evaluation questions are about a passage of the training set\n")
    load_data(DataArguments(dataset=str(sample), max_length=256), tiny_tokenizer, training())
    assert "passage of the training set" not in capsys.readouterr().out


def test_a_prompt_does_not_end_with_eos(tiny_tokenizer):
    """Some tokenizers append EOS, after which a model would have to answer."""
    plain = tiny_tokenizer("Answer:")["input_ids"]
    appending = copy.deepcopy(tiny_tokenizer)
    appending.backend_tokenizer.post_processor = TemplateProcessing(
        single="<s> $A </s>", special_tokens=[("<s>", 1), ("</s>", 2)]
    )
    batch = {"question": ["Who?"], "context": ["A node. " * 50], "answers": [["a"]]}
    assert appending("Answer:")["input_ids"] == [1, *plain, 2]
    for max_length in (512, 64):  # the second one cuts the context
        rows = tokenise_batch(batch, appending, max_length, "answer")
        prompt = rows["input_ids"][0][: rows["prompt_length"][0]]
        assert (prompt[0], 2 in prompt, rows["input_ids"][0][-1]) == (1, False, 2)


def test_subsets_depend_only_on_the_seed(sample, tiny_tokenizer):
    def ids(train_size: int = 40, **seeds: int) -> tuple[list, list]:
        arguments = DataArguments(dataset=str(sample), train_size=train_size, eval_size=20, max_length=200)
        train, evaluation, _ = load_data(arguments, tiny_tokenizer, training(**seeds))
        return train["id"][:], evaluation["id"][:]

    one, other = ids(seed=1), ids(seed=2)
    assert set(one[0]) != set(other[0])
    assert one[1] != other[1]
    assert ids(seed=1) == ids(seed=2, data_seed=1) == one
    assert ids(10, seed=1) == (one[0][:10], one[1])


def test_edited_code_has_an_effect_and_only_other_tokens_are_another_training(sample, tiny_tokenizer, monkeypatch):
    """The caches hold the rows of earlier code. Removing EOS from the labels must show another loss."""

    def load() -> datasets.Dataset:
        arguments = DataArguments(dataset=str(sample), train_size=32, max_length=128)
        return load_data(arguments, tiny_tokenizer, training())[0]

    first = load()
    for module in (data_loader, sys.modules["read_questions"]):
        assert inspect.getsource(module).encode() in data_loader.CODE
    monkeypatch.setattr(data_loader, "CODE", data_loader.CODE + b"# a comment")
    assert tokens_hash(load()) == tokens_hash(first)
    assert load()._fingerprint == first._fingerprint == "32efa64feb24e3dd", "checkpoints of 2.0.0 have this hash"

    def edited(batch: dict, *how: object) -> dict:
        return tokenise_batch(batch, *how) | {"labels": [[IGNORED]] * len(batch["question"])}

    monkeypatch.setattr(data_loader, "tokenise_batch", edited)
    monkeypatch.setattr(data_loader, "CODE", data_loader.CODE + b"other labels")
    assert load()["labels"][0] == [IGNORED]
    assert tokens_hash(load()) != tokens_hash(first)
