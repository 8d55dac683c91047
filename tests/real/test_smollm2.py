"""Test that a real pretrained model learns to answer real questions, with a stop and a resume: `make test-real`.

It learns in a full fine-tuning, and with LoRA. It also learns from conversations. data/README.md has the commands that
make the model's folder. data/README.md and docs/lora.md have the results of other learning rates.
"""

import json
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY, XQUAD, inherited

MODEL = REPOSITORY / "build" / "smollm2"
KNOBS = {
    "MODEL_NAME": str(MODEL),
    "DATASET": str(XQUAD),
    "TRAIN_SIZE": "416",  # 26 steps of 16
    "EVAL_SIZE": "64",
    "NUM_EPOCHS": "1",
    "LABELS": "answer",
    "PADDING": "longest",
    "LOSS": "chunked",
    "JOB_ID": "real",
    "CUDA_VISIBLE_DEVICES": "",
}
METHODS = {"full": {"LEARNING_RATE": "2e-4"}, "lora": {"LORA_RANK": "8", "LEARNING_RATE": "1e-3"}}
MARGIN = 10  # percentage points of Exact Match that the training must add. Measured: 36 (full) and 27 (lora)

pytestmark = [
    pytest.mark.timeout(5400),  # seconds; a training takes 4 to 6 minutes, but took 25 on a busy machine
    pytest.mark.skipif(not MODEL.exists(), reason=f"{MODEL} does not exist; data/README.md has the commands for it"),
    pytest.mark.skipif(not XQUAD.exists(), reason=f"{XQUAD} does not exist"),
]


def start(folder: Path, script: str, *words: str, **knobs: str) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, REPOSITORY / "scripts" / script, *words],
        cwd=folder,
        env=inherited() | KNOBS | knobs,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(program: subprocess.Popen, code: int = 0) -> str:
    output, _ = program.communicate()
    assert program.returncode == code, output
    return output


@pytest.fixture(scope="module")
def before(tmp_path_factory) -> float:
    """Exact Match of the pretrained model, in percent."""
    untrained = finish(start(tmp_path_factory.mktemp("untrained"), "evaluate.py"))
    return float(re.search(r"^exact_match (\S+)", untrained, re.MULTILINE)[1])


@pytest.mark.promise("a pretrained model learns real questions")
@pytest.mark.parametrize("method", METHODS)
def test_a_pretrained_model_learns_to_answer(method, before, tmp_path, capsys):
    knobs = METHODS[method]
    training = start(tmp_path, "train.py", **knobs)
    for line in training.stdout:
        if line.startswith("step 6 of 26"):
            training.send_signal(signal.SIGTERM)
            break
    finish(training, code=75)
    resumed = finish(start(tmp_path, "train.py", "--resume_from_checkpoint", **knobs))
    assert re.search(r"resuming from step \d+: ", resumed)
    after = json.loads((tmp_path / "results/real.json").read_text())["exact_match"]
    with capsys.disabled():
        print(f"\n{method}: Exact Match rose from {before:.1f} to {after:.1f} % of {KNOBS['EVAL_SIZE']} questions")
    assert after >= before + MARGIN


@pytest.mark.promise("a pretrained model learns real questions")
def test_an_instruct_model_learns_from_conversations(tmp_path, capsys):
    """The experiment own-model/chat with its own knobs. Only the model comes from another folder."""
    env_vars = (REPOSITORY / "experiments/own-model/chat/env_vars.sh").read_text().replace("$ROOT", str(REPOSITORY))
    knobs = dict(re.findall(r'^: "\$\{(\w+):=(.+)\}"', env_vars, re.MULTILINE))
    knobs |= {"MODEL_NAME": str(MODEL), "TRAIN_SIZE": "all", "EVAL_SIZE": "all"}
    log = finish(start(tmp_path, "train.py", "--eval_on_start", "True", **knobs))
    before, *_, after = (float(loss) for loss in re.findall(r"'eval_loss': '([\d.]+)'", log))
    with capsys.disabled():
        print(f"\nconversations: the evaluation loss fell from {before:.2f} to {after:.2f}")
    assert after < before - 0.4, "measured: 0.78"
