"""ask.py with a model that gives empty answers, and the flags that evaluate.py would ignore, in this process."""

import io
import sys

import pytest
from transformers import BloomConfig, BloomForCausalLM

import ask
import evaluate


@pytest.fixture
def words(tmp_path, tiny_tokenizer, monkeypatch) -> list[str]:
    """The command line without a question."""
    BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=16, n_layer=1, n_head=2)).save_pretrained(tmp_path / "m")
    tiny_tokenizer.save_pretrained(tmp_path / "m")
    (tmp_path / "text.txt").write_text("Nodes talk over a network.")
    monkeypatch.setattr(ask, "answer_questions", lambda *_: {0: ""})
    return ["--model_name", tmp_path / "m", "--context", tmp_path / "text.txt", "--max_length", "64"]


TOO_LONG = "error: --max_length: leaves no room for the question 'long long"


def test_a_session_continues_after_an_error_and_an_empty_answer_is_named(words, main_of, monkeypatch, capsys):
    typed = b"What?\n" + b"long " * 90 + b"\nM\xc3\xbc\xffller?\nWho?\n"
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(typed), "utf-8"))
    main_of(ask, *words)
    printed = capsys.readouterr()
    assert printed.out == "(the model's answer is empty)\n" * 3, "a byte that is not UTF-8 is replaced"
    (error,) = [line for line in printed.err.splitlines() if line.startswith("error: ")]
    assert error.startswith(TOO_LONG)


def test_a_question_of_the_command_line_is_refused(words, main_of, refusal):
    assert refusal(main_of, ask, *words, "long " * 90).startswith(TOO_LONG)
    line = "error: --context: is missing, and this model answers questions about a text; "
    assert refusal(main_of, ask, *words[:2], "Who?").startswith(line)


@pytest.mark.parametrize(
    ("flag", "value"), [("--deepspeed", "a.json"), ("--tensor_parallel", "2"), ("--lora_rank", "8")]
)
def test_evaluate_py_rejects_flags_that_it_would_ignore(flag, value, main_of, refusal):
    line = f"error: {flag}: evaluation holds the whole saved model on every rank; leave it out"
    assert refusal(main_of, evaluate, flag, value) == line
