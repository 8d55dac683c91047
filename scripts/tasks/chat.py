"""Conversations, written as text by the chat template of the tokenizer. The assistant's words and turn ends count.

    {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]}
    {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]}
    {"prompt": [{"role": "user", "content": "Who are you?"}], "completion": [{"role": "assistant", ...}]}
    {"instruction": "Translate.", "input": "Hallo", "output": "Hello"}
    {"question": "Who are you?", "answer": "A model."}

To find the words of a message, the template writes the conversation once more with a mark instead of them. So any
template will do, and turns that it rewrites by their place, as Qwen3's does, are found in the text that is trained. A
conversation that is too long loses its oldest questions and their answers, but not its system message.
"""

import re
from collections.abc import Iterator
from functools import cache
from typing import Any

from tasks.passage import PROMPT, USUAL_NAMES
from tasks.task import Columns, RowError, Task, common_length, identifier, read_text, token_row, usual

# The names in `messages`, and those of ShareGPT
ROLES = {"system": "system", "user": "user", "human": "user", "assistant": "assistant", "gpt": "assistant"}
MARK = "\ue000"  # a character for private use
# For a tokenizer without a chat template, such as BLOOM's
PLAIN_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '' if loop.first else '\n' }}{{ message.role | capitalize }}: {{ message.content | trim }}"
    "{{ eos_token if message.role == 'assistant' }}"
    "{% endfor %}"
    "{{ '\nAssistant:' if add_generation_prompt }}"
)


def choose(names: list[str], cells: dict[str, Any]) -> Columns | None:
    if name := usual(names, ("messages", "conversations")):
        return Columns(name)
    if isinstance(cells.get("prompt"), list) and "completion" in names:
        return Columns("prompt", "completion")
    question = usual(names, ("question", "query", "instruction"))
    answer = usual(names, ("answer", "answers", "response", "output"))
    passage = usual(names, USUAL_NAMES["context"])
    fits = not passage or (passage == "text" and {"instruction", "output"} <= {*names})  # Alpaca's text has both
    return Columns(question, usual(names, ("input",)) or "", (answer,)) if question and answer and fits else None


def read(cells: dict[str, Any], chosen: Columns, place: str) -> dict:
    if chosen.others:
        words = "\n\n".join(
            read_text(cells, column)
            for column in chosen[:2]
            if column == chosen.first or str(cells.get(column) or "").strip()  # Alpaca's input may be empty
        )
        parts: Any = [pair(words, read_text(cells, chosen.others[0]))]
    else:
        parts = [cells.get(column) for column in chosen[:2] if column]
        if not all(isinstance(part, list) and part for part in parts):
            raise RowError(f"{' or '.join(filter(None, chosen[:2]))} is not a list of messages")
    messages = check_messages([message for part in parts for message in part])
    return {
        "id": identifier(cells, place),
        "question": [message["content"] for message in messages if message["role"] == "user"][-1],
        "answers": [messages[-1]["content"].strip()],
        "messages": messages,
        "last_messages": len(parts[-1]),  # those of the completion; the turns of a prompt do not count
    }


def pair(question: str, answer: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]


def check_messages(messages: list) -> list[dict[str, str]]:
    """Return the messages with role and content only. Raise RowError with the reason if they cannot be used."""
    checked = []
    for number, message in enumerate(messages, 1):
        cells = message if isinstance(message, dict) else {}
        role, content = cells.get("role", cells.get("from")), cells.get("content", cells.get("value"))
        if role not in [*ROLES] or not isinstance(content, str) or not content.strip():
            raise RowError(f"message {number} has no text, or no role system, user or assistant: {message!r:.80}")
        checked.append({"role": ROLES[role], "content": content})
    roles = [message["role"] for message in checked]
    if "user" not in roles or roles[-1] != "assistant":
        raise RowError(f"the roles are {', '.join(roles)}, expected user and, as the last one, assistant")
    return checked


def encode(example: dict, tokenizer: Any, max_length: int, labels: str) -> list[dict]:
    messages = example["messages"]
    for number, message in enumerate(messages, 1):
        if found := expressions(tokenizer, tokenizer.chat_template)[0].search(message["content"]):
            raise RowError(f"message {number} contains the control token {found[0]!r}")
    ids, counts, begin = find_tokens(messages, example["last_messages"], tokenizer)
    if len(ids) > max_length:
        messages = shorten(messages, max_length, tokenizer)
        ids, counts, begin = find_tokens(messages, example["last_messages"], tokenizer)
    if len(ids) > max_length:
        raise RowError(f"the last question and its answer have {len(ids)} tokens, and --max_length is {max_length}")
    return [token_row(ids, [labels != "answer" or count for count in counts], begin, messages != example["messages"])]


def prompt(example: dict, room: int, tokenizer: Any) -> list[int]:
    """Return the tokens before the last answer. If its question is too long, the prompt loses its beginning."""
    *asked, answer = example["messages"]
    kept = shorten(asked, room, tokenizer, add_generation_prompt=True)
    ids, _, begin = find_tokens([*kept, answer], 1, tokenizer)
    return ids[max(0, begin - room) : begin]


def shorten(messages: list[dict[str, str]], room: int, tokenizer: Any, **options: bool) -> list[dict[str, str]]:
    """Drop the oldest question and its answer until the text has at most `room` tokens or one question is left."""
    asked = [number for number, message in enumerate(messages) if message["role"] == "user"]
    for first in [0, *asked[1:]]:
        kept = [message for number, message in enumerate(messages) if number >= first or message["role"] == "system"]
        if len(tokenizer(write(kept, tokenizer, **options), add_special_tokens=False)["input_ids"]) <= room:
            break
    return kept


def find_tokens(messages: list[dict[str, str]], last: int, tokenizer: Any) -> tuple[list[int], list[bool], int]:
    """Return the tokens of a conversation, which of them count, and the number of tokens before the last answer.

    last: the number of messages that can count, at the end of the conversation.
    """
    text = write(messages, tokenizer)
    turns = [*find_turns(text, messages, last, tokenizer)]
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    counts = [any(begin < last and first < end for begin, end in turns) for first, last in encoded["offset_mapping"]]
    return encoded["input_ids"], counts, sum(last <= turns[-1][0] for _, last in encoded["offset_mapping"])


def find_turns(text: str, messages: list[dict[str, str]], last: int, tokenizer: Any) -> Iterator[tuple[int, int]]:
    """Yield where the assistant's turns begin and end in the text of a conversation, in characters.

    A turn is what the model has to write: all that follows the generation prompt, such as a blank or an empty thought,
    the words, and the end of the turn. Raise RowError if the template writes other words than those of a message.
    """
    start = 0
    for number, message in enumerate(messages):
        before, mark, after = split_text(messages, number, tokenizer)
        end = len(text) - len(after)
        # Many templates leave out the thoughts of earlier turns
        words = message["content"] if message is messages[-1] else message["content"].rpartition("</think>")[2]
        written, expected = ("".join(each.split()) for each in (text[:end], words))
        if not mark or not text.endswith(after) or not written.endswith(expected):
            raise RowError(f"the chat template leaves out message {number + 1}, or writes it in other words")
        if message["role"] == "assistant" and number >= len(messages) - last:
            headers = [before[start:]]
            if number:
                headers.append(split_text(messages[:number], number - 1, tokenizer, add_generation_prompt=True)[2])
            ending = expressions(tokenizer, tokenizer.chat_template)[1].match(text, end)
            if not ending:
                raise RowError(f"the chat template does not end message {number + 1}, so the model would never stop")
            yield start + min(common_length(text[start:], header) for header in headers), ending.end()
        start = end


@cache
def expressions(tokenizer: Any, template: str) -> tuple[re.Pattern, re.Pattern]:
    """Return an expression for the control tokens and the mark, and one for the end of a turn, after its words.

    The end of a turn is what the template writes after any turn, before a question or at the end, without a line end.
    So it can have several tokens, as in Cohere's template, and the EOS that Phi-3's writes after the last turn is not
    part of it. In some templates, such as the one of gpt-oss, the last turn ends with another token.
    """
    named = (str(token) for token in tokenizer.added_tokens_decoder.values() if token.special)
    tokens = sorted({*named, *tokenizer.all_special_tokens, MARK}, key=len, reverse=True)
    control = re.compile(f"({'|'.join(map(re.escape, tokens))})")
    last, earlier = (control.split(split_text(turns * pair("a", "a"), 1, tokenizer)[2]) for turns in (1, 2))
    ending = "".join(last[: common_length(last, earlier)]).rstrip()
    return control, re.compile(re.escape(ending)) if ending else control


def ends(tokenizer: Any) -> list[int]:
    """Return EOS and the last token of a turn, which is another one in templates such as Gemma's."""
    control, ending = expressions(tokenizer, tokenizer.chat_template)
    found = ending.match(split_text(pair("a", "a"), 1, tokenizer)[2])
    last = control.findall(found[0])[-1:] if found else []
    return sorted({tokenizer.eos_token_id, *tokenizer.convert_tokens_to_ids(last)})


def split_text(messages: list[dict[str, str]], number: int, tokenizer: Any, **options: bool) -> tuple[str, str, str]:
    """Return the text before the words of a message, a mark if the template writes them, and the text after them."""
    marked = [*messages[:number], {**messages[number], "content": MARK}, *messages[number + 1 :]]
    return write(marked, tokenizer, **options).partition(MARK)


def write(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
    try:
        return str(tokenizer.apply_chat_template(messages, tokenize=False, **options))
    except Exception as error:  # the templates raise their own errors, such as "roles must alternate"
        raise RowError(f"the chat template refuses it ({error})") from error


CHAT = Task(
    name="chat",
    columns="messages, or question, answer, or instruction, output",
    rows="conversations",
    column="messages",
    template=PLAIN_TEMPLATE,
    choose=choose,
    read=read,
    encode=encode,
    ask=lambda question, context: {
        "messages": pair(PROMPT.format(question=question, context=context) if context else question, MARK)
    },
    prompt=prompt,
    ends=ends,
    texts=lambda example: [message["content"] for message in example["messages"]],
)
