"""The knobs of an experiment's env_vars.sh reach the run, and one given at submission comes first."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from helpers import REPOSITORY, RUN_TIMEOUT, environment

CHANGED = {
    "NUM_EPOCHS": ("num_train_epochs", 2),
    "BATCH_SIZE": ("per_device_train_batch_size", 3),
    "GRAD_ACC": ("gradient_accumulation_steps", 2),
    "TRAIN_SIZE": ("train_size", 12),
    "EVAL_SIZE": ("eval_size", 5),
    "LABELS": ("labels", "all"),
    "VOCAB_SIZE": ("vocab_size", 600),
    "HIDDEN_SIZE": ("hidden_size", 32),
    "NUM_LAYERS": ("num_layers", 1),
    "NUM_HEADS": ("num_heads", 2),
    "FF_DIM": ("ff_dim", 48),
    "SEQ_LENGTH": ("seq_length", 600),
}
SITE = """
site_setup() { PATH="%s:$PATH"; }
: "${DATASET:=$ROOT/data/squad_sample.json}" "${PADDING:=longest}" "${REQUIRE_GPU:=0}"
"""


@pytest.fixture
def experiment(tmp_path: Path) -> Path:
    """A copy of the custom model's experiment, beside the real code, with other values in its env_vars.sh."""
    for name in ("scripts", "data", "fsdp_configs"):
        (tmp_path / name).symlink_to(REPOSITORY / name)
    folder = tmp_path / "experiments" / "custom-model" / "single_node"
    original = REPOSITORY / "experiments" / "custom-model" / "single_node"
    folder.mkdir(parents=True)
    for name in ("job.sh", "load_site.sh"):
        shutil.copy(REPOSITORY / "experiments" / name, tmp_path / "experiments")
    shutil.copy(original / "single_node.slurm", folder)
    (tmp_path / "experiments" / "sites").mkdir()
    (tmp_path / "experiments" / "sites" / "test.sh").write_text(SITE % Path(sys.executable).parent)
    text = (original / "env_vars.sh").read_text()
    for variable, (_, value) in CHANGED.items():
        text, changes = re.subn(rf': "\${{{variable}:=[^"]*}}"', f': "${{{variable}:={value}}}"', text)
        assert changes, f"{variable} is not in env_vars.sh"
    (folder / "env_vars.sh").write_text(text)
    return folder


def test_every_knob_reaches_the_record(experiment: Path):
    variables = environment({"SITE": "test", "MAX_LENGTH": "256", "NUM_EPOCHS": "1", "HF_HOME": str(experiment / "hf")})
    done = subprocess.run(
        ["bash", "single_node.slurm"], cwd=experiment, env=variables, capture_output=True, text=True,
        timeout=RUN_TIMEOUT,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    (path,) = (experiment / "results").glob("*.json")
    record = json.loads(path.read_text())
    expected = dict(CHANGED.values()) | {"max_length": 256, "num_train_epochs": 1}
    assert {flag: record["settings"][flag] for flag in expected} == expected
    assert record["experiment"] == "experiments/custom-model/single_node"
    assert record["knobs"]["label mode"]["effective"] == "all"
    assert record["knobs"]["global batch"]["effective"] == 6
