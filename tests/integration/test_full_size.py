"""All 87,599 questions of SQuAD's training set, in a generated file of its size, read and tokenised."""

import json
import random
import subprocess
import sys

from helpers import REPOSITORY, environment

QUESTIONS, PARAGRAPHS = 87_599, 18_896  # of SQuAD v1.1's training set
WORDS = 120  # of a context, on average
MEASURE = """
import resource, sys, threading, time
sys.path.insert(0, sys.argv[1])
from contextlib import nullcontext
from types import SimpleNamespace
import datasets
from knobs import DataArguments, ModelArguments
from data_loader import load_squad
from model import load_tokenizer

def private_mib():  # without the pages of mapped cache files, which the kernel can drop
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) / 1024 for line in status if line.startswith("RssAnon"))

peak = 0
def watch():
    global peak
    while True:
        peak = max(peak, private_mib())
        time.sleep(0.02)

path, size, evaluation = sys.argv[2], int(sys.argv[3]), sys.argv[4]
# a tokenizer of the sample: training one on the large file is not what is measured
tokenizer = load_tokenizer(ModelArguments("tiny-bloom"), DataArguments(dataset=evaluation))
arguments = DataArguments(dataset=path, eval_dataset=evaluation, train_size=size, eval_size=1)
training = SimpleNamespace(seed=1, data_seed=None, world_size=1, main_process_first=lambda **_: nullcontext())
start = private_mib()
threading.Thread(target=watch, daemon=True).start()
begin = time.monotonic()
train, _ = load_squad(arguments, tokenizer, training)
held = private_mib() - start
print(len(train), sum(train["length"][:1000]) / 1000, start, peak - start, held, time.monotonic() - begin)
"""


def write_squad(path, questions: int) -> None:
    """A SQuAD file with the training set's proportions: about 4.6 questions for each paragraph."""
    random.seed(1)
    words = ["node", "rank", "shard", "gather", "network", "memory", "device", "batch", "step", "weight", "large"]
    paragraphs = []
    for number in range(questions * PARAGRAPHS // QUESTIONS):
        context = f"Paragraph {number}: " + " ".join(random.choices(words, k=random.randint(60, 2 * WORDS - 60)))
        start = context.index(" ", len(context) // 2) + 1
        answer = {"text": context[start:].split(" ")[0], "answer_start": start}
        paragraphs.append({"context": context, "qas": [], "answer": answer})
    for number in range(questions):
        paragraph = paragraphs[number % len(paragraphs)]
        question = f"Which {random.choice(words)} is number {number} of the {random.choice(words)} ones?"
        paragraph["qas"].append({"id": f"q{number}", "question": question, "answers": [paragraph["answer"]]})
    path.write_text(json.dumps({"version": "1.1", "data": [{"title": "t", "paragraphs": paragraphs}]}))


def measure(folder, questions: int) -> dict:
    path = folder / f"squad-{questions}.json"
    write_squad(path, questions)
    sample = str(REPOSITORY / "data" / "squad_sample.json")
    command = [sys.executable, "-c", MEASURE, str(REPOSITORY / "scripts"), str(path), str(questions), sample]
    done = subprocess.run(
        command, env=environment({"HF_HOME": str(folder / "hf")}), capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    names = ("rows", "tokens", "start", "peak", "held", "seconds")
    return dict(zip(names, map(float, done.stdout.split()[-6:]), strict=True)) | {"file": path.stat().st_size / 2**20}


def test_memory_does_not_hold_the_tokens(tmp_path):
    """The parsed JSON may be in memory (about three times its file), the tokens must go to disk batch by batch."""
    found = measure(tmp_path, QUESTIONS)
    assert found["rows"] == QUESTIONS
    assert 150 < found["tokens"] < 250  # of one sequence, as in the real data
    cached = sum(f.stat().st_size for f in (tmp_path / "hf").rglob("*.arrow")) / 2**20
    bound = 4 * found["file"] + 100
    assert found["peak"] < bound, found
    assert cached > 1.4 * bound, "a bound that the tokens in memory would not break proves nothing"
