"""Tests of an experiment's script with a real training: knobs reach the run, and the memory log is correct."""

import os
import sys

import torch

from helpers import NO_KNOBS, make_workplace
from job.memory_logs import read_cpu_log
from reporting.runs import read_run

# The job answers 32 questions at a time, so that its memory peak lasts long enough for the memory log to sample it
GIVEN = {"EM_F1": "True", "EM_F1_BATCH_SIZE": "32", "EVAL_SIZE": "64", "LOG_INTERVAL": "0.02", "REQUIRE_GPU": "0"}
GIVEN |= {"TRAIN_SIZE": "12", "NUM_EPOCHS": "1", "MAX_LENGTH": "256", "VOCAB_SIZE": "2048"}


def test_knobs_reach_the_record_and_the_cpu_log_agrees_on_the_peak_of_the_process(bench, tmp_path):
    """Run the custom model's experiment in a copy of experiments/ with links to the code."""
    make_workplace(tmp_path, "experiments")
    (tmp_path / ".venv").symlink_to(sys.prefix)
    folder = tmp_path / "experiments/custom-model/single_node"
    variables = NO_KNOBS | GIVEN | {"SITE": "laptop", "JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "unset"}
    done = bench.run("single_node.slurm", "--learning_rate", "1e-3", script="bash", cwd=folder, **variables)
    expected = {"model_name": "custom-gpt", "per_device_train_batch_size": 1, "labels": "answer", "save_strategy": "no"}
    expected |= {"padding": "longest", "hidden_size": 64, "num_heads": 4, "ff_dim": 128}  # set by the site
    expected |= {"eval_size": 64, "train_size": 12, "num_train_epochs": 1, "max_length": 256, "vocab_size": 2048}
    expected |= {"learning_rate": 1e-3, "weight_decay": 0.01}  # set by a flag and by the default
    record = done.record
    assert {flag: record["settings"][flag] for flag in expected} == expected
    assert done.effective("label mode") == "answer" and done.effective("global batch") == 4

    run = read_run(done.record_path)
    (counted,) = record["peak_process_mib"]
    said = f"{run.cpu}\n{done}"
    # psrecord counts a process twice while it forks. A process with a CUDA build of PyTorch loads some 100 MiB of
    # libraries at its end, after it has measured its peak
    (log,) = (done.record_path.parent.parent / "cpu_memory").glob("*.txt")
    samples = sorted(read_cpu_log(log).mib("process"))
    assert samples[-len(samples) // 50] <= (1.15 if torch.version.cuda else 1.05) * counted, said
    # On a busy machine psrecord waits for a core too, and may miss part of a short peak
    assert run.cpu.peak >= (0.8 if os.getloadavg()[0] > 2 * (os.cpu_count() or 1) else 0.95) * counted, said
    assert f"CPU memory: peak {run.cpu.peak:.0f} MiB" in done.out
