"""Exact Match and F1 by the rules of SQuAD v1.1, and the generation of the answers."""

import collections
import string

import pytest
import torch
from datasets import Dataset
from transformers import BloomConfig, BloomForCausalLM

from config import DataArguments, ModelArguments
from data_loader import answer_room, tokenise_batch
from helpers import REPOSITORY
from model import load_tokenizer
from training import exact_match
from training.exact_match import Generation, answer_questions, exact_match_and_f1


def score_by_rules(prediction: str, references: list[str]) -> tuple[float, float]:
    """Return Exact Match and F1 in percent, by the rules of Rajpurkar et al. (2016), section 6.1."""

    def words(text: str) -> list[str]:
        letters = "".join(c for c in text.lower() if c not in string.punctuation)
        return [word for word in letters.split() if word not in ("a", "an", "the")]

    def f1(reference: str) -> float:
        given, wanted = words(prediction), words(reference)
        common = sum((collections.Counter(given) & collections.Counter(wanted)).values())
        return 2 * common / (len(given) + len(wanted)) if common else 0.0

    return 100.0 * any(words(prediction) == words(r) for r in references), 100.0 * max(map(f1, references))


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
}


def score(monkeypatch, predictions: list[str], references: list[list[str]]) -> dict:
    monkeypatch.setattr(exact_match, "answer_questions", lambda *_: dict(enumerate(predictions)))
    questions = Dataset.from_dict({"answers": references})
    return exact_match_and_f1(None, None, questions, Generation(2, 128, CPU))


@pytest.mark.parametrize(("prediction", "references", "exact_match", "f1"), CASES.values(), ids=CASES)
def test_scores_follow_the_official_rules(prediction, references, exact_match, f1, monkeypatch):
    assert score_by_rules(prediction, references) == pytest.approx((exact_match, f1), abs=1e-3)
    assert score(monkeypatch, [prediction], [references]) == pytest.approx(
        {"exact_match": exact_match, "f1": f1}, abs=1e-3
    )


def test_scores_are_means_over_the_questions(monkeypatch):
    predictions, references = [case[0] for case in CASES.values()], [case[1] for case in CASES.values()]
    both = [score_by_rules(p, r) for p, r in zip(predictions, references, strict=True)]
    scores = score(monkeypatch, predictions, references)
    assert scores["exact_match"] == pytest.approx(sum(em for em, _ in both) / len(both), abs=1e-3)
    assert scores["f1"] == pytest.approx(sum(f1 for _, f1 in both) / len(both), abs=1e-3)


class PromptCounter(torch.nn.Module):
    """A model that records each call and answers with one token, which encodes the number of tokens in the prompt."""

    device = torch.device("cpu")

    def __init__(self, eos: int):
        super().__init__()
        self.eos, self.calls = eos, []

    def generate(self, input_ids, attention_mask, **options):
        self.calls.append((input_ids, attention_mask, options))
        answer = FIRST_WORD + attention_mask.sum(dim=1, keepdim=True)
        return torch.cat([input_ids, answer, torch.full_like(answer, self.eos)], dim=1)


@pytest.fixture(scope="session")
def tokenizer():
    sample = str(REPOSITORY / "data" / "squad_sample.json")
    return load_tokenizer(ModelArguments("tiny-bloom"), DataArguments(dataset=sample))


@pytest.fixture
def questions(tokenizer):
    rows = {
        "question": [f"Which {'fast ' * n}network is number {n}?" for n in range(5)],
        "context": ["Nodes talk over a fast network."] * 5,
        "answers": [["a fast network"]] * 5,
    }
    return Dataset.from_dict(rows | tokenise_batch(rows, tokenizer, 128, "answer"))


def test_every_question_is_answered_also_in_an_incomplete_batch(tokenizer, questions):
    model = PromptCounter(tokenizer.eos_token_id)
    answers = answer_questions(model, tokenizer, questions, Generation(2, 128, CPU))
    assert sorted(answers) == [0, 1, 2, 3, 4]
    assert [len(ids) for ids, _, _ in model.calls] == [2, 2, 1]
    lengths = questions["prompt_length"][:]
    assert len(set(lengths)) == 5
    asked = [mask.sum(1).tolist() for _, mask, _ in model.calls]
    assert asked == [lengths[:2:-1], lengths[2:0:-1], lengths[:1]], (
        "prompts of similar length share a batch, and the longest come first"
    )
    assert [answers[i] for i in range(5)] == [tokenizer.decode(FIRST_WORD + n).strip() for n in lengths]


def test_generation_is_greedy_cached_left_padded_and_sees_no_answer(tokenizer, questions):
    model = PromptCounter(tokenizer.eos_token_id)
    answer_questions(model, tokenizer, questions, Generation(5, 128, CPU))
    ((ids, mask, options),) = model.calls
    for i, row in enumerate(reversed(list(questions))):  # the longest prompt comes first
        prompt = row["input_ids"][: row["prompt_length"]]
        assert ids[i, -len(prompt) :].tolist() == prompt
        assert tokenizer.decode(prompt).endswith("Answer:")
        assert mask[i].sum() == len(prompt)
        assert mask[i, : -len(prompt)].sum() == 0
    assert options["do_sample"] is False
    assert options["use_cache"] is True
    assert options["max_new_tokens"] == answer_room(128)


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_run_equally_many_batches_and_answer_all_questions(ranks, tokenizer, questions, monkeypatch):
    monkeypatch.setattr(exact_match, "world_size", lambda: ranks)
    calls, answers = [], {}
    for rank in range(ranks):
        monkeypatch.setattr(exact_match, "rank", lambda number=rank: number)
        model = PromptCounter(tokenizer.eos_token_id)
        answers |= answer_questions(model, tokenizer, questions, Generation(1, 128, CPU, sharded=True))
        calls.append(len(model.calls))
        assert all(options["synced_gpus"] for _, _, options in model.calls)
    assert set(calls) == {-(-5 // ranks)}
    assert sorted(answers) == [0, 1, 2, 3, 4]


def test_padding_of_a_batch_does_not_change_the_answers(tokenizer, questions):
    torch.manual_seed(0)
    config = BloomConfig(vocab_size=len(tokenizer), hidden_size=32, n_layer=2, n_head=2, initializer_range=0.5)
    model = BloomForCausalLM(config)
    model.generation_config.pad_token_id, model.generation_config.eos_token_id = 3, 2
    alone, together = (answer_questions(model, tokenizer, questions, Generation(size, 128, CPU)) for size in (1, 5))
    assert alone == together
    assert len(set(alone.values())) > 1
