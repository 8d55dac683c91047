"""Ask a trained model a question, or a question about a text.

    python scripts/ask.py --model_name output/123 "What is a node?"       # a model of a chat, or of completions
    python scripts/ask.py --model_name output/123 --context text.txt "What do nodes send over the network?"
    python scripts/ask.py --model_name output/123 --context text.txt      # reads questions until Ctrl-D

The model gets the same prompt as in the training, and the answer is decoded greedily, as for Exact Match and F1. Each
question is a new conversation. A model that was not trained here is asked by its chat template, if it has one.
"""

import sys
from collections.abc import Iterator
from typing import Any

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

import torch
from datasets import Dataset

from config import DEFAULTS
from measure.exact_match import Generation, answer_questions
from model import check_model, load_model, load_tokenizer
from read_questions import READABLE
from settings.command_line import parse_command_line
from settings.precision import DTYPES
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.hub import draw_bars_on_terminals_only
from shared.json_files import decode, read_bytes
from tasks import TASKS, TRAINED_ON
from tasks.chat import CHAT
from tasks.passage import PASSAGE, answer_room
from tasks.task import RowError, Task


def main() -> None:
    draw_bars_on_terminals_only()
    parser = OneLineErrors(description=__doc__)
    parser.add_argument("question", nargs="?", help="without it, questions are read from the terminal")
    parser.add_argument("--model_name", "--model-name", required=True, help="folder of the saved model, or a Hub name")
    parser.add_argument("--context", help="file with the text that contains the answer; passages need it")
    parser.add_argument("--max_length", "--max-length", default=DEFAULTS["max_length"], help="as in the training")
    arguments = parser.parse_args()
    path = arguments.context
    context = decode(path, read_bytes(path, READABLE)).strip() if path else ""
    flags = ["--model_name", arguments.model_name, "--max_length", str(arguments.max_length)]
    settings = parse_command_line(__doc__, flags)
    tokenizer = load_tokenizer(settings.model, settings.data)
    model: Any = load_model(settings.model, tokenizer, seed=0)
    max_length = settings.data.max_length
    check_model(model, tokenizer, max_length)
    task = trained_task(model.config, tokenizer.chat_template, context)
    device = torch.device("cpu" if settings.trainer.use_cpu else "cuda")
    model.to(device)
    for question in [arguments.question] if arguments.question else typed_questions():
        try:
            example = task.ask(question, context)
            rooms = (sys.maxsize, max_length - answer_room(max_length))
            whole, prompt = (task.prompt(example, room, tokenizer) for room in rooms)
        except (WorkshopError, RowError) as error:
            refusal = error if isinstance(error, WorkshopError) else WorkshopError("question", str(error), "change it")
            if arguments.question:
                raise refusal from error
            print(f"error: {refusal}", file=sys.stderr)
            continue
        if len(whole) > len(prompt):
            print("note: a part of the prompt was cut off; see --max_length", file=sys.stderr)
        limit = max_length - len(prompt)  # all tokens that the prompt leaves
        questions = Dataset.from_list([{**example, "prompt_length": len(prompt)}])
        with torch.autocast(device.type, dtype=DTYPES[settings.precision], enabled=settings.precision != "fp32"):
            answers = answer_questions(model, tokenizer, questions, Generation(1, max_length, device), limit)
        print(answers[0] or "(the model's answer is empty)", flush=True)


def trained_task(config: Any, chat_template: str | None, context: str) -> Task:
    """Return the kind of data on which a model was trained. config, chat_template: those of the model's folder.

    A model that was not trained here gets a chat if it has a template, but a question about a text as in SQuAD.
    """
    usual = CHAT if chat_template and not context else PASSAGE
    task = next(task for task in TASKS if task.name == getattr(config, TRAINED_ON, usual.name))
    if task is PASSAGE and not context:
        remedy = "give a file with the text that contains the answer"
        raise WorkshopError("--context", "is missing, and this model answers questions about a text", remedy)
    return task


def typed_questions() -> Iterator[str]:
    """Yield the lines that the user types, or that another program sends, until Ctrl-D, Ctrl-C or the end."""
    # Without this line, bytes that are not UTF-8 would end the session with a traceback
    sys.stdin.reconfigure(errors="replace")  # type: ignore[union-attr]
    while True:
        try:
            line = input("question: " if sys.stdin.isatty() else "")
        except (EOFError, KeyboardInterrupt):
            return
        if line.strip():
            yield line.strip()


if __name__ == "__main__":
    run_program(main)
