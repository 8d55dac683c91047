"""A prompt and its completion, word for word: the tokens are those of the two texts, one after the other, and EOS.

    {"prompt": "The sky is", "completion": " blue."}

The names are those of TRL's dataset formats. A prompt that is too long loses its beginning.
"""

from typing import Any

from tasks.task import (
    Columns,
    RowError,
    Task,
    common_length,
    identifier,
    keep_end,
    leading_tokens,
    read_text,
    token_row,
    tokenise_texts,
    usual,
)


def choose(names: list[str], cells: dict[str, Any]) -> Columns | None:
    prompt, completion = usual(names, ("prompt",)), usual(names, ("completion",))
    return Columns(prompt, completion) if prompt and completion else None


def read(cells: dict[str, Any], chosen: Columns, place: str) -> dict:
    prompt, completion = read_text(cells, chosen.first), read_text(cells, chosen.second)
    return {
        "id": identifier(cells, place),
        "question": prompt,
        "answers": [completion.strip()],
        "prompt": prompt,
        "completion": completion,
    }


def split_tokens(example: dict, tokenizer: Any) -> tuple[list[int], list[int]]:
    """Return the tokens of the prompt, and those of the completion.

    A token that has the end of the prompt and the beginning of the completion belongs to the completion.
    """
    before = example["prompt"]
    prompt, whole = tokenise_texts([before, before + example.get("completion", "")], tokenizer)
    begin = common_length(prompt, whole)
    return whole[:begin], whole[begin:]


def encode(example: dict, tokenizer: Any, max_length: int, labels: str) -> list[dict]:
    tokens, completion = split_tokens(example, tokenizer)
    ending = [*completion, tokenizer.eos_token_id]
    leading = len(leading_tokens(tokenizer))
    room = max_length - len(ending)
    if room <= leading:
        raise RowError(f"the completion has {len(completion)} tokens, so no prompt fits into --max_length")
    prompt = keep_end(tokens, room, tokenizer)
    counted = [labels != "answer"] * len(prompt) + [True] * len(ending)
    return [token_row(prompt + ending, counted, len(prompt), cut=leading + len(tokens) > room)]


def prompt(example: dict, room: int, tokenizer: Any) -> list[int]:
    return keep_end(split_tokens(example, tokenizer)[0], room, tokenizer)


COMPLETION = Task(
    name="completion",
    columns="prompt, completion",
    rows="prompts",
    column="prompt",  # a question to a trained model has no completion
    choose=choose,
    read=read,
    encode=encode,
    ask=lambda question, context: {"prompt": f"{context}{question}"},
    prompt=prompt,
    texts=lambda example: [example["prompt"], example["completion"]],
)
