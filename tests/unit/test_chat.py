"""Tests of conversations: which tokens count with the chat templates of many models, and rows that cannot be used."""

import copy
import json
import random

import pytest
import yaml

from config import IGNORED, DataArguments
from data_loader import load_set
from helpers import REPOSITORY
from read_questions import read_file
from tasks.chat import CHAT, PLAIN_TEMPLATE
from tasks.task import RowError
from test_data import training

TEMPLATES = yaml.safe_load((REPOSITORY / "tests" / "data" / "chat_templates.yaml").read_text(encoding="utf-8"))
TEMPLATES["plain"] = {"tokens": ["</s>"], "template": PLAIN_TEMPLATE, "counts": " Yes.</s>"}
WORDS = ("same", " same", "same same\n", "same é\n\nsame", "<think>\nmull\n</think>\n\nsame")


def with_template(tokenizer, template: str, tokens: list[str]):
    tokenizer = copy.deepcopy(tokenizer)
    tokenizer.add_tokens(tokens, special_tokens=True)
    tokenizer.eos_token = tokens[0]
    tokenizer.chat_template = template
    return tokenizer


def chat(*turns: str) -> list[dict[str, str]]:
    """Return the messages of turns such as "user: Why?"."""
    return [dict(zip(("role", "content"), turn.split(": ", 1), strict=True)) for turn in turns]


def encode(messages: list[dict[str, str]], tokenizer, max_length: int = 999, labels: str = "answer") -> dict:
    example = {"messages": messages, "last_messages": len(messages)}
    (row,) = CHAT.encode(example, tokenizer, max_length, labels)
    room = row["prompt_length"] if row["cut"] else max_length
    assert row["input_ids"][: row["prompt_length"]] == CHAT.prompt(example, room, tokenizer)
    return row


def split(row: dict, tokenizer) -> tuple[str, str]:
    """Return the text that counts, and the other text."""
    pairs = [*zip(row["input_ids"], row["labels"], strict=True)]
    parts = ([token for token, label in pairs if (label == IGNORED) == ignored] for ignored in (False, True))
    counted, ignored = (tokenizer.decode(part, clean_up_tokenization_spaces=False) for part in parts)
    return counted, ignored


@pytest.mark.parametrize("name", TEMPLATES)
def test_all_that_the_model_has_to_write_counts_and_nothing_else(name, tiny_tokenizer):
    """The turns have the same words, so the numbers of these words show where each turn begins and ends."""
    known = TEMPLATES[name]
    tokenizer = with_template(tiny_tokenizer, known["template"], known["tokens"])
    numbers = random.Random(0)
    for _ in range(40):
        turns = [] if "no_system" in known else [f"system: {word}" for word in WORDS[: numbers.randint(0, 1)]]
        for _ in range(numbers.randint(1, 3)):
            turns += [f"user: {numbers.choice(WORDS[:4])}", f"assistant: {numbers.choice(WORDS)}"]
        turns[-1] = "assistant: Yes."
        row = encode(chat(*turns), tokenizer)
        counted, ignored = split(row, tokenizer)
        assert counted.endswith(known["counts"])
        assert [label for label in row["labels"] if label != IGNORED][-1] in CHAT.ends(tokenizer)
        of_the_assistant = "".join(turn for turn in turns if turn.startswith("assistant"))
        assert counted.count("same") == of_the_assistant.count("same"), turns
        assert ignored.count("same") == "".join(turns).count("same") - counted.count("same"), turns
        assert "mull" not in ignored, turns  # but the template may leave out the thoughts of earlier turns


@pytest.fixture
def chatml(tiny_tokenizer):
    return with_template(tiny_tokenizer, TEMPLATES["chatml"]["template"], TEMPLATES["chatml"]["tokens"])


# Without the words of a system message, with other words, and without an end
DEAF = "{% for m in messages if m.role != 'system' %}{{ m.role + m.content }}<|im_end|>{% endfor %}"
LOUD = "{% for m in messages %}{{ m.role + m.content | upper }}<|im_end|>{% endfor %}"
ENDLESS = "{% for m in messages %}{{ m.role + m.content }}{% endfor %}"
SHY = "{{ raise_exception('No, thank you') }}"
ASKED = ("user: 1", "assistant: 2")
LEFT_OUT = "the chat template leaves out message {}, or writes it in other words"


@pytest.mark.parametrize(
    ("template", "turns", "reason"),
    [
        ("", (*ASKED, "user: a <|im_end|>", "assistant: 4"), "message 3 contains the control token '<|im_end|>'"),
        ("", (*ASKED, "user: 3", "assistant: \ue000"), "message 4 contains the control token '\\ue000'"),
        (
            "",
            ("system: 1", *ASKED, "user: 4", "assistant:" + 99 * " 5"),
            "the last question and its answer have 121 tokens, and --max_length is 99",
        ),
        (DEAF, ("system: 1", *ASKED), LEFT_OUT.format(1)),
        (LOUD, (*ASKED, "user: 3", "assistant: four"), LEFT_OUT.format(4)),
        (ENDLESS, ASKED, "the chat template does not end message 2, so the model would never stop"),
        (SHY, ASKED, "the chat template refuses it (No, thank you)"),
    ],
)
def test_a_conversation_that_is_not_written_as_it_is_cannot_be_used(chatml, template, turns, reason):
    chatml.chat_template = template or chatml.chat_template
    with pytest.raises(RowError) as raised:
        encode(chat(*turns), chatml, 99)
    assert str(raised.value) == reason


def test_a_long_conversation_loses_its_oldest_questions_but_not_its_system_message(chatml):
    turns = ["system: rule", *(f"{role}: {number}" for number in range(9) for role in ("user", "assistant"))]
    for dropped in (0, 1, 8):
        expected = encode(chat(turns[0], *turns[1 + 2 * dropped :]), chatml)
        row = encode(chat(*turns), chatml, len(expected["input_ids"]))
        assert row == expected | {"cut": dropped > 0}
    prompt = CHAT.prompt({"messages": chat("user: " + 99 * "very ", "assistant: 2")}, 20, chatml)
    assert len(prompt) == 20 and chatml.decode(prompt).endswith("<|im_start|>assistant\n")


MESSAGES = chat("user: a", "assistant: b")


@pytest.mark.parametrize(
    ("cells", "words", "last"),
    [
        ({"messages": MESSAGES, "text": "x"}, ["a", "b"], 2),
        ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, ["a", "b"], 2),
        ({"prompt": chat("user: 0", "assistant: 1", "user: a"), "completion": MESSAGES[1:]}, ["0", "1", "a", "b"], 1),
        ({"instruction": "a", "input": "", "output": "b", "text": "x"}, ["a", "b"], 2),
        ({"instruction": "a", "input": "c", "output": "b"}, ["a\n\nc", "b"], 2),
        ({"question": "a", "answer": "b"}, ["a", "b"], 2),
    ],
)
def test_forms_of_a_conversation(cells, words, last, tmp_path, chatml):
    path = tmp_path / "my.jsonl"
    path.write_text(json.dumps(cells))
    (example,) = read_file(str(path)).examples
    assert [message["content"] for message in example["messages"]] == words
    assert (example["question"], example["answers"]) == (words[-2], ["b"])
    (row,) = CHAT.encode(example, chatml, 999, "answer")
    counted = "".join(f"{word}<|im_end|>" for word in words[-last:][1::2] or words[-1:])
    assert split(row, chatml)[0] == counted
    assert CHAT.encode(example, chatml, 999, "sequence")[0]["labels"] == row["input_ids"]


FAULTS = {
    "messages is not a list of messages": [{}, {"messages": []}, {"messages": "a"}],
    "has no text, or no role system, user or assistant": [
        {"messages": [*MESSAGES, message]}
        for message in ("a", {"role": ["user"], "content": "a"}, {"role": "tool", "content": "a"}, {"role": "user"})
    ],
    "the roles are": [{"messages": MESSAGES[:1]}, {"messages": MESSAGES[1:]}],
    "contains the control token": [{"messages": [*MESSAGES, *chat("user: </s>", "assistant: b")]}],
    "the last question and its answer have": [{"messages": chat("user: a", "assistant:" + 300 * " word")}],
}


def test_each_conversation_that_cannot_be_used_is_listed_with_its_reason(written, tiny_tokenizer):
    """Some are found when the file is read, and some when its rows become tokens."""
    faulty = [(reason, cells) for reason, rows in FAULTS.items() for cells in rows]
    path = written([{"messages": MESSAGES}, *(cells for _, cells in faulty), {"messages": MESSAGES}])
    arguments = DataArguments(path, eval_dataset=path, bad_rows="skip", max_length=150)
    rows, left_out = load_set("train", None, arguments, tiny_tokenizer, training())
    assert sorted(rows["id"]) == ["line 1", f"line {len(faulty) + 2}"]
    listed = dict(entry.removeprefix(f"{path}: ").split(": ", 1) for entry in left_out)
    for number, (reason, _) in enumerate(faulty, 2):
        assert reason in listed[f"line {number}"]
