"""Documents, cut into pieces of --max_length tokens. No token is lost, and EOS ends each document.

    {"text": "The sky is blue."}

A .txt or .md file is one document.
"""

from typing import Any

from tasks.task import (
    Columns,
    Task,
    decode,
    identifier,
    keep_end,
    leading_tokens,
    read_text,
    token_row,
    tokenise_texts,
    usual,
)


def choose(names: list[str], cells: dict[str, Any]) -> Columns | None:
    name = usual(names, ("text",))
    return Columns(name) if name else None


def read(cells: dict[str, Any], chosen: Columns, place: str) -> dict:
    return {"id": identifier(cells, place), "question": "", "answers": [], "text": read_text(cells, chosen.first)}


def encode(example: dict, tokenizer: Any, max_length: int, labels: str) -> list[dict]:
    """Return one row of tokens for each piece of the document, with the text of the piece."""
    (tokens,) = tokenise_texts([example["text"]], tokenizer)
    document = [*leading_tokens(tokenizer), *tokens, tokenizer.eos_token_id]
    ends = [*range(max_length, len(document), max_length), len(document)]
    if len(ends) > 1 and ends[-1] - ends[-2] == 1:
        ends[-2] -= 1  # the first token of a row is never a target, so a row needs two tokens
    pieces = [document[first:last] for first, last in zip([0, *ends], ends, strict=False)]
    return [token_row(piece, [True] * len(piece), len(piece)) | {"text": decode(piece, tokenizer)} for piece in pieces]


def prompt(example: dict, room: int, tokenizer: Any) -> list[int]:
    return keep_end(tokenise_texts([example["text"]], tokenizer)[0], room, tokenizer)


TEXT = Task(
    name="text",
    columns="text",
    rows="pieces",
    unit="document",
    column="text",
    labels="sequence",
    pieces=True,
    choose=choose,
    read=read,
    encode=encode,
    ask=lambda question, context: {"text": f"{context}{question}"},
    prompt=prompt,
    texts=lambda example: [example["text"]],
)
