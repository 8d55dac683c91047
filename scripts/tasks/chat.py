"""Conversations, written as text by the chat template of the tokenizer. The assistant's words and turn ends count.

    {"messages": [{"role": "user", "content": "Who are you?"}, {"role": "assistant", "content": "A model."}]}
    {"conversations": [{"from": "human", "value": "Who are you?"}, {"from": "gpt", "value": "A model."}]}
    {"prompt": [{"role": "user", "content": "Who are you?"}], "completion": [{"role": "assistant", ...}]}
    {"instruction": "Translate.", "input": "Hallo", "output": "Hello"}
    {"question": "Who are you?", "answer": "A model."}

To find a turn in the text, the template writes the conversation once more with a mark instead of the turn's words. So
it needs no marks of its own, and turns that it rewrites by their place, as Qwen3's does, are found as they are trained.
"""

from typing import Any

from tasks.passage import PROMPT, USUAL_NAMES
from tasks.task import Columns, RowError, Task, common_length, identifier, read_text, token_row, usual

ROLES = ("system", "user", "assistant")
SHAREGPT = {"human": "user", "gpt": "assistant"}  # its messages have the keys from and value
MARK = "\ue000"  # a character for private use, which no text contains
QUESTIONS = ("question", "query", "instruction")
INPUTS = ("input",)
ANSWERS = ("answer", "answers", "response", "output")
# For a tokenizer without a chat template, such as BLOOM's
PLAIN_TEMPLATE = (
    "{% for message in messages %}{% if not loop.first %}\n{% endif %}"
    "{{ message.role | capitalize }}: {{ message.content | trim }}"
    "{% if message.role == 'assistant' %}{{ eos_token }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}\nAssistant:{% endif %}"
)


def choose(names: list[str], cells: dict[str, Any]) -> Columns | None:
    for name in ("messages", "conversations"):
        if name in names:
            return Columns(name)
    if isinstance(cells.get("prompt"), list) and "completion" in names:
        return Columns("prompt", "completion")
    passage = usual(names, USUAL_NAMES["context"])
    if {"instruction", "output"} <= {*names} and passage in (None, "text"):  # Alpaca has the whole prompt as text
        return Columns("instruction", usual(names, INPUTS) or "", ("output",))
    question, answer = usual(names, QUESTIONS), usual(names, ANSWERS)
    return Columns(question, others=(answer,)) if question and answer and not passage else None


def read(cells: dict[str, Any], chosen: Columns, place: str) -> dict:
    if chosen.others:
        words = read_text(cells, chosen.first)
        if chosen.second and str(cells.get(chosen.second) or "").strip():
            words = f"{words.strip()}\n\n{read_text(cells, chosen.second)}"
        parts: Any = [[], []]
        turns: Any = [("user", words), ("assistant", read_text(cells, chosen.others[0]))]
        messages: Any = [{"role": role, "content": text} for role, text in turns]
    else:
        parts = [cells.get(column) for column in chosen[:2] if column]
        if not all(isinstance(part, list) and part for part in parts):
            raise RowError(f"{' or '.join(filter(None, chosen[:2]))} is not a list of messages")
        messages = [message for part in parts for message in part]
    messages = check_messages(messages)
    said = [message["content"] for message in messages if message["role"] == "user"]
    return {
        "id": identifier(cells, place),
        "question": said[-1],
        "answers": [messages[-1]["content"].strip()],
        "messages": messages,
        "context_messages": len(parts[0]) if len(parts) > 1 else 0,  # a prompt, whose turns do not count
    }


def encode(example: dict, tokenizer: Any, max_length: int, labels: str) -> list[dict]:
    text, spans = render(example["messages"], example["context_messages"], tokenizer)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    ids, places = encoded["input_ids"], encoded["offset_mapping"]
    counts = [any(begin < last and first < end for begin, end in spans) for first, last in places]
    # The last turn begins with the last token that counts after one that does not
    begin = next((i for i in reversed(range(len(ids))) if counts[i] and (i == 0 or not counts[i - 1])), 0)
    if labels == "answer" and not any(counts[:max_length]):
        raise RowError("the first answer begins after --max_length tokens")
    counted = [labels != "answer" or count for count in counts]
    cut = len(ids) > max_length
    return [token_row(ids[:max_length], counted[:max_length], min(begin, max_length), cut, answer_cut=cut)]


def ask(question: str, context: str) -> dict:
    """Return the conversation that begins with a question. With a context, it is the prompt about a passage."""
    words = PROMPT.format(question=question, context=context) if context else question
    return {"messages": [{"role": "user", "content": words}]}


def prompt(example: dict, room: int, tokenizer: Any) -> list[int]:
    """Return the tokens of the conversation without its last answer. A long conversation loses its beginning."""
    messages = example["messages"]
    asked = messages[:-1] if messages[-1]["role"] == "assistant" else messages
    text = apply(asked, tokenizer, add_generation_prompt=True)
    return tokenizer(text, add_special_tokens=False)["input_ids"][-room:]


def check_messages(messages: list) -> list[dict[str, str]]:
    """Return the messages with role and content only. Raise RowError with the reason if they cannot be used."""
    checked = []
    for number, message in enumerate(messages):
        known: Any = message if isinstance(message, dict) else {}
        role, content = (known.get(key) for key in (("from", "value") if "from" in known else ("role", "content")))
        role = SHAREGPT.get(str(role), role)
        if role not in ROLES:
            raise RowError(f"message {number + 1}: the role is {role!r:.40}, expected {', '.join(ROLES)}")
        if not isinstance(content, str) or not content.strip():
            raise RowError(f"message {number + 1}: the content is {content!r:.40}, expected a text")
        checked.append({"role": role, "content": content})
    roles = [message["role"] for message in checked]
    if "user" not in roles or roles[-1] != "assistant":
        raise RowError(f"the roles are {', '.join(roles)}, expected user and, as the last one, assistant")
    return checked


def render(messages: list[dict[str, str]], first: int, tokenizer: Any) -> tuple[str, list[tuple[int, int]]]:
    """Return the text of a conversation, and where the assistant's turns begin and end in it, in characters.

    first: the number of messages before the first one that can count.

    Raise RowError if a message contains a control token, which would end its turn, or if the template loses a turn.
    """
    for message in messages:
        for token in tokenizer.all_special_tokens:
            if token in message["content"]:
                raise RowError(f"a message contains the control token {token!r}")
    text = apply(messages, tokenizer)
    spans = []
    for number, message in enumerate(messages):
        if message["role"] != "assistant" or number < first:
            continue
        marked = apply([*messages[:number], {**message, "content": MARK}, *messages[number + 1 :]], tokenizer)
        begin = common_length(text, marked)
        end = len(text) - common_length(text[begin:][::-1], marked[begin:][::-1])
        if begin >= end or squeeze(text[begin:end]) not in squeeze(message["content"]):
            raise RowError(f"the chat template leaves out message {number + 1}, or writes it in other words")
        prompt = apply(messages[:number], tokenizer, add_generation_prompt=True)
        # What stands between the prompt and the words, such as a blank, must be written by the model, so it counts
        if text.startswith(prompt):
            begin = min(begin, len(prompt))
        spans.append((begin, turn_end(text, end, tokenizer)))
    return text, spans


def squeeze(text: str) -> str:
    return "".join(text.split())


def turn_end(text: str, end: int, tokenizer: Any) -> int:
    """Return the end of a turn: after the control token that follows its words, if there is one."""
    start = end + len(text[end:]) - len(text[end:].lstrip())
    tokens = [token for token in tokenizer.all_special_tokens if text.startswith(token, start)]
    return start + max(map(len, tokens)) if tokens else end


def apply(messages: list[dict[str, str]], tokenizer: Any, **options: bool) -> str:
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
    ask=ask,
    prompt=prompt,
    texts=lambda example: [message["content"] for message in example["messages"]],
)
