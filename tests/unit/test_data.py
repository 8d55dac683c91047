"""SQuAD files: the bundled one is what its README says, the user's own are refused with the place of the fault."""

import json
import re
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace

import datasets
import huggingface_hub.constants
import pytest

import data_loader
import hub
from data_loader import (
    UNANSWERABLE,
    load_evaluation_set,
    load_from_hub,
    load_squad,
    questions_cut,
    read_part,
    read_questions,
)
from helpers import REPOSITORY
from knobs import DataArguments, ModelArguments
from model import load_tokenizer

XQUAD = REPOSITORY.parent / "shared" / "data" / "xquad.en.json"
CONTEXT = "Nodes talk over a fast network. Each node holds eight devices."


@contextmanager
def first(local: bool, desc: str):
    yield


def training(seed: int = 42, data_seed: int | None = None, world_size: int = 1) -> SimpleNamespace:
    return SimpleNamespace(seed=seed, data_seed=data_seed, world_size=world_size, main_process_first=first)


def question(identifier: str = "q", text: str = "fast network", **other: object) -> dict:
    answers = [{"text": text, "answer_start": CONTEXT.index(text)}]
    return {"id": identifier, "question": "What is it?", "answers": answers} | other


def squad(*questions: dict, context: object = CONTEXT) -> dict:
    return {"version": "1.1", "data": [{"title": "t", "paragraphs": [{"context": context, "qas": list(questions)}]}]}


@pytest.fixture
def written(tmp_path):
    def write(content: object, name: str = "my.json") -> str:
        path = tmp_path / name
        path.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
        return str(path)

    return write


@pytest.fixture(scope="session")
def tokenizer():
    sample = str(REPOSITORY / "data" / "squad_sample.json")
    return load_tokenizer(ModelArguments("tiny-bloom"), DataArguments(dataset=sample))


def read(path: str, part: str = "all") -> list[dict]:
    return list(read_questions(path, part))


# The bundled sample


def test_sample_has_correct_answers_unique_ids_and_enough_questions(sample):
    paragraphs = [p for article in json.loads(sample.read_text())["data"] for p in article["paragraphs"]]
    questions = [q for p in paragraphs for q in p["qas"]]
    assert len(paragraphs) >= 40
    assert len(questions) >= 160
    assert len({q["id"] for q in questions}) == len(questions)
    assert len({p["context"] for p in paragraphs}) == len(paragraphs)
    for paragraph in paragraphs:
        for item in paragraph["qas"]:
            assert item["question"].endswith("?")
            for answer in item["answers"]:
                start, text = answer["answer_start"], answer["text"]
                assert paragraph["context"][start : start + len(text)] == text == text.strip()
    assert len(read(str(sample))) == len(questions)


def test_readme_of_the_data_tells_the_truth_about_it(sample):
    readme = (REPOSITORY / "data" / "README.md").read_text()
    content = json.loads(sample.read_text())
    paragraphs = [p for article in content["data"] for p in article["paragraphs"]]
    answers = [q["answers"] for p in paragraphs for q in p["qas"]]
    row = re.search(r"\| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) bytes \|", readme)
    counted = (len(content["data"]), len(paragraphs), len(answers), sum(map(len, answers)), sample.stat().st_size)
    assert tuple(map(int, row.groups())) == counted
    references = re.search(r"(\d+) questions have one reference answer, (\d+) have two and (\d+) have three", readme)
    assert [int(n) for n in references.groups()] == [sum(len(a) == n for a in answers) for n in (1, 2, 3)]
    words = [len(p["context"].split()) for p in paragraphs]
    assert f"Contexts have {min(words)} to {max(words)} words" in readme
    assert {len(p["qas"]) for p in paragraphs} == {4, 5}
    assert "with 4 or 5 questions each" in readme
    foreign = sum(not p["context"].isascii() for p in paragraphs)
    assert f"{foreign} contexts hold non-ASCII characters" in " ".join(readme.split())
    assert re.search(r"^Licence: .*CC0-1\.0", readme, re.MULTILINE)


def test_the_format_that_the_readme_shows_is_read(written):
    readme = (REPOSITORY / "data" / "README.md").read_text()
    example = re.search(r"```json\n(.*?)```", readme, re.DOTALL)[1]
    assert [q["answers"] for q in read(written(example.encode()))] == [["a fast network"], [UNANSWERABLE]]


# Bad files


FAULTS = {
    "empty": (b"", ": Expecting value: line 1 column 1 (char 0); is the file complete?"),
    "truncated": (b'{"data": [{"paragraphs": [', ": Expecting value: line 1 column 27 (char 26); is the file"),
    "not UTF-8": (b'{"data": "caf\xe9"}', ": 'utf-8' codec can't decode byte 0xe9 in position 13"),
    "a list": ([], ": data: is missing, expected a list; see data/README.md for the format"),
    "no paragraphs": ({"data": [{}]}, ": data[0].paragraphs: is missing, expected a list"),
    "blank context": (squad(question(), context=" "), ": data[0].paragraphs[0].context: is ' ', expected a text"),
    "no question": (
        squad(question(), {"id": "b", "answers": []}),
        ": data[0].paragraphs[0].qas[1].question: is missing, expected a text",
    ),
    "id is a number": (squad(question(7)), ": data[0].paragraphs[0].qas[0].id: is 7, expected a text"),
    "answers as the Hub has them": (
        squad(question(answers={"text": ["fast"]})),
        ": data[0].paragraphs[0].qas[0].answers: is {'text': ['fast']}, expected a list",
    ),
    "no answer": (
        squad(question(answers=[])),
        ": data[0].paragraphs[0].qas[0].answers: is empty; give an answer, or set is_impossible to true",
    ),
    "no offset": (
        squad(question(answers=[{"text": "fast"}])),
        ": data[0].paragraphs[0].qas[0].answers[0].answer_start: is missing, expected a whole number",
    ),
    "wrong offset": (
        squad(question(answers=[{"text": "fast", "answer_start": 3}])),
        ": data[0].paragraphs[0].qas[0].answers[0]: 'fast' is not at character 3 of its context; correct answer_start",
    ),
}


@pytest.mark.parametrize(("content", "beginning"), FAULTS.values(), ids=FAULTS)
def test_bad_file_is_refused_with_the_place_of_the_fault(content, beginning, written, refusal):
    path = written(content)
    assert refusal(read, path).startswith(f"error: {path}{beginning}")


def test_fault_at_the_end_of_a_file_is_found_before_the_training(written, tokenizer, refusal):
    faulty = question("z", answers=[{"text": "fast", "answer_start": 0}])
    path = written(squad(*(question(str(n)) for n in range(50)), faulty))
    arguments = DataArguments(dataset=path, eval_dataset=path, train_size=4, eval_size=4)
    line = refusal(load_squad, arguments, tokenizer, training())
    assert line.startswith(f"error: {path}: data[0].paragraphs[0].qas[50].answers[0]: 'fast' is not at character 0")


def test_path_without_a_file_is_refused(tmp_path, written, refusal):
    def part(name: str, dataset: str, eval_dataset: str | None = None):
        return read_part(name, DataArguments(dataset=dataset, eval_dataset=eval_dataset))

    way_out = "correct --dataset"
    assert refusal(part, "train", "gone.json") == f"error: gone.json: there is no such file; {way_out}"
    assert refusal(part, "train", "./gone").startswith("error: ./gone: there is no such file; ")
    assert refusal(part, "train", str(tmp_path)).startswith(f"error: {tmp_path}: Is a directory; check the path")
    path = written(squad(question()))
    assert (
        refusal(part, "eval", path, "gone.json")
        == "error: gone.json: No such file or directory; check the path and its permissions"
    )


def test_path_below_the_users_home_is_read(tmp_path, written, monkeypatch):
    """As a site file gives it, where no shell replaces the ~."""
    written(squad(question()))
    monkeypatch.setenv("HOME", str(tmp_path))
    train = read_part("train", DataArguments(dataset="~/my.json", eval_dataset="~/my.json"))
    assert train["id"][:] == ["q"]


def test_file_with_too_few_paragraphs_to_hold_out_some_asks_for_an_evaluation_file(written, refusal):
    path = written(squad(question()))
    line = refusal(read_part, "eval", DataArguments(dataset=path))
    assert line.startswith(f"error: {path}: no question in its held out paragraphs; give --eval_dataset, or a file")


def test_unanswerable_questions_of_squad_2_get_the_answer_that_says_so(written):
    plausible = [{"text": "Nodes", "answer_start": 0}]
    path = written(squad(question(answers=[], is_impossible=True, plausible_answers=plausible), question("b")))
    assert [q["answers"] for q in read(path)] == [[UNANSWERABLE], ["fast network"]]


def test_all_reference_answers_are_kept_and_offsets_count_characters(written):
    context = "Der Rechner heißt Zürich-1 und läuft."
    answers = [{"text": t, "answer_start": context.index(t)} for t in ("Zürich-1", "läuft")]
    path = written(squad(question(answers=answers), context=context))
    assert read(path)[0]["answers"] == ["Zürich-1", "läuft"]


# Subsets


def load(sample: Path, tokenizer, arguments: dict, **options: object) -> tuple[list, list]:
    """Ids of the training and the evaluation set."""
    given = DataArguments(dataset=str(sample), **{"train_size": 40, "eval_size": 20, "max_length": 200, **arguments})
    train, evaluation = load_squad(given, tokenizer, training(**options))
    return train["id"][:], evaluation["id"][:]


def test_held_out_paragraphs_are_every_fifth_and_never_trained_on(sample):
    train, held_out = (read(str(sample), part) for part in ("train", "held out"))
    assert not {q["context"] for q in train} & {q["context"] for q in held_out}
    assert len(train) + len(held_out) == len(read(str(sample)))
    contexts = list(dict.fromkeys(q["context"] for q in read(str(sample))))
    assert list(dict.fromkeys(q["context"] for q in held_out)) == contexts[4::5]


def test_subsets_depend_on_the_seed_alone(sample, tokenizer):
    one, again, other = (load(sample, tokenizer, {}, seed=seed) for seed in (1, 1, 2))
    assert one == again
    assert one[0] != other[0]
    assert set(one[0]) != set(other[0])
    assert one[1] != other[1]
    assert load(sample, tokenizer, {}, seed=2, data_seed=1) == one
    assert load(sample, tokenizer, {"train_size": 10}, seed=1)[0] == one[0][:10]


def test_samples_per_gpu_times_ranks_is_the_training_size(sample, tokenizer):
    assert len(load(sample, tokenizer, {"samples_per_gpu": 6}, world_size=4)[0]) == 24


def test_questions_that_were_cut_are_counted(written, tokenizer):
    path = written(squad(*map(question, "abc"), context=CONTEXT * 40))
    short = written(squad(*map(question, "de")), "short.json")
    arguments = {"dataset": path, "eval_dataset": short, "train_size": 3, "eval_size": 2}
    for max_length, cut in ((100, 3), (2000, 0)):
        sets = load_squad(DataArguments(**arguments, max_length=max_length), tokenizer, training())
        assert questions_cut(*sets) == {"train": cut, "eval": 0}


def test_no_cache_of_other_rows_is_read(sample, tokenizer, monkeypatch):
    arguments = DataArguments(dataset=str(sample), eval_size=3, max_length=200)
    before = load_evaluation_set(arguments, tokenizer, training())._fingerprint
    assert load_evaluation_set(arguments, tokenizer, training())._fingerprint == before
    monkeypatch.setattr(data_loader, "ROWS_VERSION", data_loader.ROWS_VERSION + 1)
    assert load_evaluation_set(arguments, tokenizer, training())._fingerprint != before


def test_asking_for_more_than_there_is_names_both_numbers(sample, tokenizer, refusal):
    cases = [
        ({"train_size": 281}, "281 questions wanted, but {} has 280 to train on; lower it", "--train_size"),
        ({"samples_per_gpu": 100}, "400 questions wanted, but {} has 280 to train on", "--samples_per_gpu"),
        ({"eval_size": 68}, "68 questions wanted, but {} has 67 to eval on", "--eval_size"),
    ]
    for arguments, what, flag in cases:
        line = refusal(lambda given=arguments: load(sample, tokenizer, given, world_size=4))
        assert what.format(sample) in line
        assert flag in line


def test_evaluation_alone_takes_the_same_questions_whatever_the_training_size(sample, tokenizer):
    arguments = DataArguments(dataset=str(sample), train_size=9999, eval_size=20, max_length=200)
    alone = load_evaluation_set(arguments, tokenizer, training(seed=1))
    assert alone["id"][:] == load(sample, tokenizer, {}, seed=1)[1]


def test_changed_file_is_read_again(written, tokenizer):
    path = written(squad(question("before")))
    arguments = DataArguments(dataset=path, eval_dataset=path, train_size=1, eval_size=1)
    assert load_squad(arguments, tokenizer, training())[0]["id"][0] == "before"
    written(squad(question("after", "eight devices")))
    row = load_squad(arguments, tokenizer, training())[0][0]
    assert (row["id"], row["answers"]) == ("after", ["eight devices"])


@pytest.mark.skipif(not XQUAD.exists(), reason=f"{XQUAD} is not here")
def test_real_squad_file_is_read_split_and_tokenised(tokenizer):
    questions = read(str(XQUAD))
    assert len(questions) == 1190
    assert all(q["answers"][0] in q["context"] for q in questions)
    arguments = DataArguments(dataset=str(XQUAD), train_size=500, eval_size=200, max_length=384)
    train, evaluation = load_squad(arguments, tokenizer, training())
    assert (len(train), len(evaluation)) == (500, 200)
    assert not set(train["context"][:]) & set(evaluation["context"][:])
    assert max(train["length"][:]) <= 384


# The Hub


def hub_squad(name: str, split: str) -> datasets.Dataset:
    answers = [{"text": ["fast network"], "answer_start": [15]}, {"text": [], "answer_start": []}]
    rows = {"id": [split, "b"], "title": ["t"] * 2, "question": ["What?"] * 2, "context": [CONTEXT] * 2}
    return datasets.Dataset.from_dict(rows | {"answers": answers})


@pytest.fixture
def reachable(monkeypatch):
    monkeypatch.setattr(hub.socket, "create_connection", lambda *_, **__: SimpleNamespace(close=lambda: None))


def test_squad_of_the_hub_looks_like_a_local_file(reachable, monkeypatch):
    monkeypatch.setattr(data_loader, "load_dataset", hub_squad)
    arguments = DataArguments(dataset="squad_v2")
    for part, split in (("train", "train"), ("eval", "validation")):
        questions = read_part(part, arguments, "m")
        assert set(questions.column_names) == {"id", "question", "context", "answers"}
        assert questions["id"][:] == [split, "b"]
        assert questions["answers"][:] == [["fast network"], [UNANSWERABLE]]


def test_hub_data_set_that_is_no_squad_is_refused(reachable, monkeypatch, refusal):
    monkeypatch.setattr(data_loader, "load_dataset", lambda *_, **__: hub_squad("", "").remove_columns("answers"))
    assert refusal(load_from_hub, "imdb", "train", "m").startswith("error: --dataset: imdb cannot be loaded (")


def test_without_network_and_cache_the_prefetch_command_is_printed(monkeypatch, refusal):
    def unreachable(*args, **kwargs):
        raise OSError("no route")

    def not_cached(name, split):
        assert huggingface_hub.constants.HF_HUB_OFFLINE
        raise ConnectionError("offline")

    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_OFFLINE", False)
    monkeypatch.setattr(hub.socket, "create_connection", unreachable)
    monkeypatch.setattr(data_loader, "load_dataset", not_cached)
    assert refusal(load_from_hub, "squad", "train", "bigscience/bloom-560m") == (
        "error: --dataset: squad is no local path, not in the cache, and there is no network; on a login node run: "
        "python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad"
    )
