"""Measure how much two training runs differ that differ only in the seed.

    python benchmarks/seeds.py --model build/smollm2 --dataset ../shared/data/xquad.en.json
    python benchmarks/seeds.py ... --save       # also write seeds.json, of which `make pages` shows mean and spread

SmolLM2-135M learns real questions, once per seed (data/README.md has the commands that make both files). As in each
training run, the seed chooses the questions and their order: 416 of the 880 about three quarters of the passages to
train on, and 256 of the 310 about the others to evaluate.
Two runs whose losses or scores differ by less than the spread of these runs do not show which setting is better.
"""

import argparse
import json
import tempfile
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from harness import REPOSITORY, SCRIPTS, commit, run_training, versions

RESULTS = Path(__file__).with_suffix(".json")
KNOBS = {
    "TRAIN_SIZE": "416",  # 26 steps of 16 questions
    "EVAL_SIZE": "256",
    "NUM_EPOCHS": "1",
    "LEARNING_RATE": "2e-4",
    "LABELS": "answer",
    "PADDING": "none",
    "BF16": "True",  # half the time of fp32
    "LOSS": "chunked",
    "SAVE_STRATEGY": "no",
    "CUDA_VISIBLE_DEVICES": "",
}


def divide(dataset: Path, folder: Path) -> dict[str, str]:
    """Write every fourth passage of a SQuAD file to one file, and the others to another. Return both as knobs."""
    paragraphs = [each for article in json.loads(dataset.read_text())["data"] for each in article["paragraphs"]]
    parts = {"EVAL_DATASET": paragraphs[::4], "DATASET": [p for n, p in enumerate(paragraphs) if n % 4]}
    for name, part in parts.items():
        (folder / f"{name}.json").write_text(json.dumps({"data": [{"paragraphs": part}]}))
    return {name: str(folder / f"{name}.json") for name in parts}


def train(model: Path, dataset: Path, seed: int) -> dict:
    """Return loss and scores of a run with this seed."""
    with tempfile.TemporaryDirectory() as folder:
        knobs = KNOBS | divide(dataset, Path(folder)) | {"MODEL_NAME": str(model.resolve()), "OMP_NUM_THREADS": "1"}
        _, record = run_training(Path(folder), [str(SCRIPTS / "train.py"), "--seed", str(seed)], **knobs)
    found = {"eval_loss": record["eval"][-1]["loss"], "exact_match": record["exact_match"], "f1": record["f1"]}
    run = {"seed": seed, "train_loss": record["train"]["loss_mean"], **found}
    print(run, flush=True)
    return run


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=REPOSITORY / "build" / "smollm2")
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--at_once", type=int, default=2, help="runs at the same time, each on one core with 6 GB")
    parser.add_argument("--save", action="store_true", help=f"write {RESULTS.name}")
    arguments = parser.parse_args()
    with ThreadPoolExecutor(arguments.at_once) as pool:
        runs = list(pool.map(partial(train, arguments.model, arguments.dataset), range(arguments.seeds)))
    if arguments.save:
        content = {"commit": commit(), "versions": versions(), "knobs": KNOBS, "runs": runs}
        RESULTS.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
