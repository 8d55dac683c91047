"""A test on a GPU: the energy in the run record agrees with the power that nvidia-smi logs next to the training."""

import json
import os
import signal
import statistics
import subprocess
import sys

import pytest
import torch

from helpers import inherited, make_workplace, until
from job.memory_logs import read_gpu_log

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="PyTorch sees no CUDA GPU here")
SECONDS = 200  # samples of a training that is known to run
MODEL = {"VOCAB_SIZE": "8192", "HIDDEN_SIZE": "2048", "NUM_LAYERS": "4", "NUM_HEADS": "16", "FF_DIM": "8192"}
RUN = MODEL | {"TRAIN_SIZE": "256", "BATCH_SIZE": "8", "GRAD_ACC": "2", "PADDING": "max_length", "MAX_LENGTH": "512"}
RUN |= {
    "LEARNING_RATE": "1e-5",
    "SITE": "laptop",
    "JOB_ID": "7",
    "CUDA_VISIBLE_DEVICES": "0",
    "LOG_INTERVAL": "1",
    "EM_F1": "False",
}
FLAGS = ["--max_steps", "1000000", "--logging_steps", "5", "--eval_strategy", "no"]


@pytest.mark.promise("energy adds up over stops, and is empty with a reason where it cannot be known")
def test_joules_of_the_record_agree_with_the_power_in_the_gpu_log(tmp_path):
    make_workplace(tmp_path, "experiments")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    folder = tmp_path / "experiments/custom-model/single_node"
    log = folder / "gpu_memory/gpu_memory_log_7.csv"

    def watts() -> list[float]:
        return [watts for _, watts in read_gpu_log(log).power_curve("0")]

    path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])
    environment = inherited() | RUN | {"PATH": path}
    with (tmp_path / "out").open("w") as out:
        streams = {"stdout": out, "stderr": subprocess.STDOUT}
        job = subprocess.Popen(["bash", "single_node.slurm", *FLAGS], cwd=folder, env=environment, **streams)
    text = (tmp_path / "out").read_text
    try:
        until(lambda: "'loss': " in text(), 300, lambda: job.poll() is not None)
        start = len(watts())
        until(lambda: len(watts()) >= start + SECONDS, 3 * SECONDS, lambda: job.poll() is not None, pause=1)
        found = watts()[start : start + SECONDS]
    finally:
        job.send_signal(signal.SIGTERM)
        job.wait(300)
    assert job.returncode == 75, text()[-3000:]
    record = json.loads((folder / "results/7.json").read_text())
    energy, train = record["energy"], record["train"]
    steady_seconds = train["steady_steps"] / train["steady_steps_per_second"]
    assert steady_seconds > 180
    print(f"{energy['mean_watts']} W by the counter, {statistics.fmean(found):.2f} W by nvidia-smi, {energy}")
    assert energy["mean_watts"] == pytest.approx(statistics.fmean(found), rel=0.1), energy
    assert energy["steady_joules_sum"] == pytest.approx(energy["mean_watts"] * steady_seconds, rel=0.01)
    assert energy["kwh"] * 3.6e6 > energy["steady_joules_sum"]
