"""Ask a trained model a question about a text.

    python scripts/ask.py --model_name output/123 --context text.txt "What do nodes send over the network?"
    python scripts/ask.py --model_name output/123 --context text.txt      # reads questions until Ctrl-D

The model gets the same prompt as in the training, and the answer is decoded greedily, as for Exact Match and F1.
"""

import argparse
import sys
from collections.abc import Iterator
from typing import Any

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

import torch
from datasets import Dataset

from config import DEFAULTS
from data_loader import tokenise_batch
from model import check_model, load_model, load_tokenizer
from read_questions import READABLE
from settings.command_line import parse_command_line
from settings.precision import DTYPES
from shared.errors import OneLineErrors, WorkshopError, run_program
from shared.hub import draw_bars_on_terminals_only
from shared.json_files import decode, read_bytes
from tasks.passage import PASSAGE, UNANSWERABLE
from training.exact_match import Generation, answer_questions


def main() -> None:
    draw_bars_on_terminals_only()
    parser = OneLineErrors(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("question", nargs="?", help="without it, questions are read from the terminal")
    parser.add_argument("--model_name", "--model-name", required=True, help="folder of the saved model, or a Hub name")
    parser.add_argument("--context", required=True, help="file with the text that contains the answer")
    parser.add_argument("--max_length", "--max-length", default=DEFAULTS["max_length"], help="as in the training")
    arguments = parser.parse_args()
    context = read_text(arguments.context)
    flags = ["--model_name", arguments.model_name, "--max_length", str(arguments.max_length)]
    settings = parse_command_line(__doc__, flags)
    tokenizer = load_tokenizer(settings.model, settings.data)
    model: Any = load_model(settings.model, tokenizer, seed=0)
    max_length = settings.data.max_length
    check_model(model, tokenizer, max_length)
    device = torch.device("cpu" if settings.trainer.use_cpu else "cuda")
    model.to(device)
    for question in [arguments.question] if arguments.question else typed_questions():
        try:
            # The reference answer is not part of the prompt; the format only requires one
            batch = {"id": [""], "question": [question], "context": [context], "answers": [[UNANSWERABLE]]}
            prompt = Dataset.from_dict(tokenise_batch(batch, tokenizer, max_length, PASSAGE.labels))
        except WorkshopError as error:
            if arguments.question:
                raise
            print(f"error: {error}", file=sys.stderr)
            continue
        if prompt["cut"][0]:
            print(f"note: the end of {arguments.context} was cut off; see --max_length", file=sys.stderr)
        limit = max_length - prompt["prompt_length"][0]  # all tokens that the prompt leaves
        with torch.autocast(device.type, dtype=DTYPES[settings.precision], enabled=settings.precision != "fp32"):
            answers = answer_questions(model, tokenizer, prompt, Generation(1, max_length, device), limit)
        print(answers[0] or "(the model's answer is empty)", flush=True)


def read_text(path: str) -> str:
    """Return the content of a text file. Raise WorkshopError (exit code 2) if it is unusable."""
    text = decode(path, read_bytes(path, READABLE))
    if not text.strip():
        raise WorkshopError(path, "is empty", "give a file with the text that contains the answer")
    return text.strip()


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
