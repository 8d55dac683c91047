"""Exact Match and F1 by the rules of SQuAD v1.1, and the generation of the answers."""

import copy

import pytest
import torch
from datasets import Dataset
from tokenizers.normalizers import NFKC
from transformers import GenerationConfig

from config import DataArguments
from data_loader import answer_limit, tokenise_batch
from training import exact_match
from training.exact_match import CHANGED, EMPTY, Generation, answer_questions, check_references, exact_match_and_f1

CPU = torch.device("cpu")
FIRST_WORD = 400  # in the tiny tokenizer, lower ids are single bytes
CASES = {
    "equal": ("a fast network", ["a fast network"], 100, 100),
    "articles do not count": ("The network", ["a network"], 100, 100),
    "punctuation does not count": ("all-reduce.", ["allreduce"], 100, 100),
    "case does not count": ("NCCL", ["nccl"], 100, 100),
    "spaces do not count": ("eight  devices ", ["eight devices"], 100, 100),
    "article inside a word stays": ("theory", ["ory"], 0, 0),
    "partly right": ("fast network card", ["fast network"], 0, 80),
    "a repeated word counts once": ("fast fast", ["fast network"], 0, 50),
    "order does not count for F1": ("network fast", ["fast network"], 0, 100),
    "the best of several references": ("eight", ["seven", "eight devices", "eight"], 100, 100),
    "best F1 of several references": ("eight devices", ["eight", "nine"], 0, 66.6667),
    "empty prediction": ("", ["eight"], 0, 0),
    "wrong": ("nine", ["eight"], 0, 0),
    "another Unicode form": ("cafe\u0301", ["caf\u00e9"], 100, 100),
}


def score(monkeypatch, predictions: list[str], references: list[list[str]]) -> dict:
    monkeypatch.setattr(exact_match, "answer_questions", lambda *_: dict(enumerate(predictions)))
    monkeypatch.setattr(exact_match, "answer_limit", lambda *_: 32)
    questions = Dataset.from_dict({"answers": references})
    return exact_match_and_f1(None, None, questions, Generation(2, 128, CPU), DataArguments(em_f1=True))


@pytest.mark.parametrize(("prediction", "references", "exact_match", "f1"), CASES.values(), ids=CASES)
def test_scores_follow_the_official_rules(prediction, references, exact_match, f1, monkeypatch):
    assert score(monkeypatch, [prediction], [references]) == pytest.approx(
        {"exact_match": exact_match, "f1": f1}, abs=1e-3
    )


def test_scores_are_means_over_the_questions(monkeypatch):
    predictions, references, exact_matches, f1s = zip(*CASES.values(), strict=True)
    means = {"exact_match": sum(exact_matches) / len(CASES), "f1": sum(f1s) / len(CASES)}
    assert score(monkeypatch, predictions, references) == pytest.approx(means, abs=1e-3)


class PromptCounter(torch.nn.Module):
    """A model that records each call and answers with one token, which encodes the number of tokens in the prompt."""

    device = torch.device("cpu")

    def __init__(self, eos: int):
        super().__init__()
        self.eos, self.calls = eos, []
        self.generation_config = GenerationConfig(num_beams=4)

    def generate(self, input_ids, attention_mask, **options):
        assert self.generation_config is options["generation_config"]
        self.calls.append((input_ids, attention_mask, options))
        answer = FIRST_WORD + attention_mask.sum(dim=1, keepdim=True)
        return torch.cat([input_ids, answer, torch.full_like(answer, self.eos)], dim=1)


@pytest.fixture
def questions(tiny_tokenizer):
    rows = {
        "question": [f"Which {'fast ' * n}network is number {n}?" for n in range(5)],
        "context": ["Nodes talk over a fast network."] * 5,
        "answers": [["a fast network"]] * 5,
    }
    return Dataset.from_dict(rows | tokenise_batch(rows, tiny_tokenizer, 128, "answer"))


def test_every_question_is_answered_also_in_an_incomplete_batch(tiny_tokenizer, questions):
    model = PromptCounter(tiny_tokenizer.eos_token_id)
    answers = answer_questions(model, tiny_tokenizer, questions, Generation(2, 128, CPU), 32)
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert [len(ids) for ids, _, _ in model.calls] == [2, 2, 1]
    lengths = questions["prompt_length"][:]
    assert len(set(lengths)) == 5
    asked = [mask.sum(1).tolist() for _, mask, _ in model.calls]
    assert asked == [lengths[:2:-1], lengths[2:0:-1], lengths[:1]], (
        "prompts of similar length share a batch, and the longest come first"
    )
    assert [answers[i] for i in range(5)] == [tiny_tokenizer.decode(FIRST_WORD + n).strip() for n in lengths]


def test_generation_is_greedy_cached_left_padded_and_sees_no_answer(tiny_tokenizer, questions):
    model = PromptCounter(tiny_tokenizer.eos_token_id)
    answer_questions(model, tiny_tokenizer, questions, Generation(5, 128, CPU), 32)
    ((ids, mask, options),) = model.calls
    for i, row in enumerate(reversed(list(questions))):  # the longest prompt comes first
        prompt = row["input_ids"][: row["prompt_length"]]
        assert ids[i, -len(prompt) :].tolist() == prompt
        assert tiny_tokenizer.decode(prompt).endswith("Answer:")
        assert mask[i].sum() == len(prompt)
        assert mask[i, : -len(prompt)].sum() == 0
    used = options["generation_config"]
    assert (used.do_sample, used.num_beams, used.use_cache, used.max_new_tokens) == (False, 1, True, 32)
    assert model.generation_config.num_beams == 4, "a save after the answers would lose the settings of the model"


def set_of(tokenizer, *answers: list[str]) -> Dataset:
    rows = {"question": ["Which network?"] * len(answers), "context": ["Nodes. " * 90] * len(answers)}
    rows["answers"] = list(answers)
    return Dataset.from_dict(rows | tokenise_batch(rows, tokenizer, 128, "answer"))


def test_prompt_and_longest_answer_fit_into_max_length(tiny_tokenizer, capsys):
    """The answers with 60 and more tokens are not the first ones, so the training reserves only 32 tokens."""
    long = " ".join(["network"] * 60)
    questions = set_of(tiny_tokenizer, ["eight"], ["nine", long])
    assert answer_limit(questions, tiny_tokenizer, 128) == len(tiny_tokenizer(f" {long}")["input_ids"]) + 1 == 61
    assert answer_limit(set_of(tiny_tokenizer, ["eight"]), tiny_tokenizer, 128) == 32
    model = PromptCounter(tiny_tokenizer.eos_token_id)
    answer_questions(model, tiny_tokenizer, questions, Generation(2, 128, CPU), 61)
    ((ids, _, _),) = model.calls
    assert ids.shape == (2, 128 - 61)
    assert all(tiny_tokenizer.decode(row).endswith(" Answer:") for row in ids)
    much_too_long = set_of(tiny_tokenizer, ["eight", " ".join(["network"] * 600)])
    assert check_references(tiny_tokenizer, much_too_long, 128) == {}, "the answer eight can be given"
    assert capsys.readouterr().out.startswith("1 of 1 prompts are cut further, to leave ")
    limit = answer_limit(much_too_long, tiny_tokenizer, 128)
    assert limit + len(tiny_tokenizer("Question: Which network? Context: Answer:")["input_ids"]) == 128


@pytest.mark.promise("EM and F1 measure the model, whatever its folder and the length of its answers")
def test_the_log_names_answers_whose_scores_are_not_fair(tiny_tokenizer, capsys):
    nfkc = copy.deepcopy(tiny_tokenizer)
    nfkc.backend_tokenizer.normalizer = NFKC()
    questions = set_of(nfkc, ["10²"], ["the"], ["cafe\u0301"], ["</s>"], ["wrong²", "right"], ["no answer"])
    assert check_references(nfkc, questions, 128) == {CHANGED: 1, EMPTY: 1}
    assert capsys.readouterr().out == f"1 of 6 evaluation questions: {CHANGED} ('10²' becomes '102')\n" + (
        f"1 of 6 evaluation questions: {EMPTY} ('the')\n"
    )
    assert check_references(tiny_tokenizer, set_of(tiny_tokenizer, ["10²"], ["a b"]), 128) == {}
