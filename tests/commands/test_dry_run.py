"""Tests of DRY_RUN=1, which shows a job's commands and errors and writes no file."""

import json
import math
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import psutil
import pytest
from transformers import LlamaConfig

import estimate_memory
from config import DataArguments
from data_loader import read_part
from estimate.command_line import parse_memory_plan
from helpers import EXPERIMENT_SCRIPTS, EXPERIMENTS, REPOSITORY
from job.directives import read_directives
from shell import program, shell_environment

MEMORY = psutil.virtual_memory().total / 2**30  # GiB of this machine, which the site laptop compares with


def dry_run(folder: Path, *arguments: str, **variables: object) -> subprocess.CompletedProcess:
    (script,) = folder.glob("*.slurm")
    environment = shell_environment(**{"DRY_RUN": 1} | variables)
    command = ["bash", script.name, *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300)


def files(folder: Path) -> set[Path]:
    return {path for path in folder.rglob("*") if "__pycache__" not in path.parts}


def knobs_from(lines: list[str], origin: str) -> set[str]:
    """The knobs that the output lists under this origin."""
    block = "\n".join(lines).split("knobs, by where they come from:\n")[1]
    found = re.search(rf"^  {origin} +(.*(?:\n {{14}}.*)*)", block, re.MULTILINE)
    return set(found[1].split()) if found else set()


# Write the arguments and variables of the estimate to a file
NOTE = """
import json, os, sys
if sys.argv[1].endswith("estimate_memory.py"):
    with open(os.environ["NOTED"], "w") as file:
        json.dump([sys.argv[2:], dict(os.environ)], file)
else:
    os.execv(sys.executable, [sys.executable, *sys.argv[1:]])
"""


def test_a_job_that_no_node_of_the_site_can_run_is_refused(workshop):
    done = dry_run(workshop / "experiments/ddp/4_gpus", SITE="laptop", GPUS_PER_NODE=2)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(
        "error: ddp.slurm: it needs 4 GPUs per node, and GPUS_PER_NODE=2 of the site; choose "
    )


def test_estimate_at_a_site_without_gpus_describes_the_cpu_run(workshop):
    done = dry_run(workshop / "experiments/ddp/2_gpus", SITE="laptop", FP16="False", CUDA_VISIBLE_DEVICES="")
    assert ", fp32, micro batch 4 x 512 tokens, 2 rank(s) without a GPU on 1 node(s)\n" in done.stdout
    assert "one GPU" not in done.stdout and "for sbatch" not in done.stdout


@pytest.mark.promise("commands work as printed", "each experiment sets its own knobs, also in a copy")
@pytest.mark.parametrize("family", sorted({path.relative_to(EXPERIMENTS).parts[0] for path in EXPERIMENT_SCRIPTS}))
def test_every_experiment_shows_its_command_and_can_be_estimated(workshop, tmp_path, family, monkeypatch):
    """A site file of version 2.0.0 sets no knobs, so experiments keep their sizes. This process makes the estimates."""
    shutil.copy(REPOSITORY / "tests/data/runs_of_2.0.0/mycluster.sh", workshop / "experiments/sites")
    (tmp_path / "note.py").write_text(NOTE)
    program(tmp_path / "bin", "python", f"exec '{sys.executable}' '{tmp_path}/note.py' \"$@\"")
    path = f"{tmp_path}/bin:{shell_environment()['PATH']}"
    before = files(workshop)
    for script in (workshop / "experiments" / family).rglob("*.slurm"):
        noted = tmp_path / "noted.json"
        done = dry_run(script.parent, PATH=path, SITE="mycluster", NOTED=noted)
        assert (done.returncode, done.stderr) == (0, ""), done
        text = script.read_text()
        experiment = script.parent.relative_to(workshop)
        assert f"{experiment}: site mycluster, " in done.stdout
        if "/train.py" not in text:
            continue
        words, variables = json.loads(noted.read_text())
        noted.unlink()
        if "SmolLM2" in variables.get("MODEL_NAME", ""):
            variables["MODEL_NAME"] = "bigscience/bloom-560m"  # its shape needs no network
        monkeypatch.chdir(script.parent)
        settings = parse_memory_plan(words, environment=variables)
        table = estimate_memory.memory_table(settings)
        assert "one GPU: " in table and "one node: " in table
        knobs = re.findall(r'^: "\$\{(\w+):=([\w.]+)\}"', script.with_name("env_vars.sh").read_text(), re.MULTILINE)
        assert "--knobs" in words
        assert words[words.index("--cpu_memory") + 1] == read_directives(script)["mem"].removesuffix("G")
        shown = knobs_from(settings.knob_lines(), "experiment")
        assert {f"{name}={value}" for name, value in knobs} <= shown, "knobs that the experiment sets"
    assert files(workshop) == before


@pytest.mark.promise("commands work as printed")
def test_the_afternoon_runs_on_a_laptop(workshop, tmp_path):
    """Section 6 trains. The others only show their commands, here without the slow estimates."""
    (workshop / "exercises").symlink_to(REPOSITORY / "exercises")
    program(tmp_path / "bin", "python", f'[[ $1 = */estimate_memory.py ]] || exec {sys.executable} "$@"')
    tiny = {"TRAIN_SIZE": 8, "EVAL_SIZE": 4, "MAX_LENGTH": 256, "NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}
    script = workshop / "experiments/afternoon.sh"
    head, *sections = script.read_text().split("\n# === ")
    for section in sections:
        end = "status: completed" if "docs/ddp.md" in section else ""
        script.write_text(f"{head}\n# === {section}")
        path = f"{tmp_path}/bin:{shell_environment()['PATH']}"
        environment = shell_environment(**tiny, PATH=path, SITE=None, DRY_RUN=None if end else 1)
        done = subprocess.run([script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        jobs = re.findall(r"^\(cd (\S+)", section, re.MULTILINE)
        shown = re.findall(r"^(?:job \S+ of )?(experiments/\S+): site laptop", done.stdout, re.MULTILINE)
        assert (done.returncode, shown, "all-reduce" in done.stdout) == (0, jobs, False), done.stdout
        assert done.stdout.count(end or "Nothing is trained.") == (len(jobs) if end else 1)
        assert {f"# === {section}".splitlines()[0], *section.partition("\n\n")[0].splitlines()[1:]} <= {
            *done.stdout.splitlines()
        }


@pytest.mark.promise("your own model and data: from a table to a model that answers")
def test_a_copy_of_the_own_model_experiment_shows_this_model(workshop, tmp_path, sample):
    """The site laptop sets tiny-bloom, the sample and small sizes for the workshop's experiments only."""
    LlamaConfig(vocab_size=600, hidden_size=32, num_hidden_layers=2, num_attention_heads=2).save_pretrained(tmp_path)
    copy = workshop / "experiments/own/mine"
    shutil.copytree(workshop / "experiments/own-model/train", copy)
    assert "my-squad.json: there is no such file" in dry_run(copy, DATASET="my-squad.json").stderr
    shutil.copy(sample, copy / "my-squad.json")
    with (copy / "env_vars.sh").open("a") as file:
        file.write(': "${TRAINSIZE:=200}"\n')
    done = dry_run(copy, MODEL_NAME=tmp_path, DATASET="my-squad.json")
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert lines[0] == "experiments/own/mine: site laptop, 1 node(s) x 4 rank(s)"
    assert [line for line in lines if line.startswith("warning: ")] == [
        "warning: TRAINSIZE: this variable is not read; did you mean TRAIN_SIZE?"
    ]
    assert knobs_from(lines, "submission") == {f"MODEL_NAME={tmp_path}", "DATASET=my-squad.json"}
    assert {"LEARNING_RATE=5e-05", "PADDING=longest", "BF16=True"} <= knobs_from(lines, "experiment")
    assert {"TRAIN_SIZE", "EVAL_SIZE"} <= knobs_from(lines, "unset")
    questions = len(read_part("train", DataArguments(dataset=str(sample))).rows)
    steps = 3 * math.ceil(questions / 16)
    batch = "global batch: 16 (micro batch 4 x accumulation 1 x 4 rank(s))"
    assert f"{batch}, {steps} steps for 3 epochs of {questions} questions" in lines, "as in a trial on one process"
    not_saved = "the trained model will not be saved (SAVE_STRATEGY=no)"
    assert "the trained model will be saved in output/<job id>" in lines
    assert not_saved in dry_run(copy, MODEL_NAME=tmp_path, SAVE_STRATEGY="no").stdout.splitlines()


@pytest.mark.promise("each knob is shown with its source", "a container: outside, a job needs two packages")
def test_dry_run_shows_site_ranks_commands_knobs_and_memory(workshop, contained):
    folder = workshop / "experiments/deepspeed-multi-node/2_nodes"
    before = files(workshop)
    done = dry_run(folder, "--learning_rate", "1e-4", BATCH_SIZE=2, GPU_MEMORY=16, DRY_RUN="true", **contained)
    assert (done.returncode, done.stderr) == (0, ""), done
    lines = done.stdout.splitlines()
    assert lines[0] == "experiments/deepspeed-multi-node/2_nodes: site laptop, 2 node(s) x 1 rank(s)"
    words = f"srun --nodes=2 --ntasks-per-node=1 {contained['CONTAINER']} python "
    bandwidth, training = [line for line in lines if line.startswith(words)]
    assert "measure_bandwidth.py" in bandwidth
    assert "--nproc-per-node=1" in training and training.endswith("zero2.json' --learning_rate 1e-4")
    assert knobs_from(lines, "flag") == {"LEARNING_RATE=0.0001"}
    assert knobs_from(lines, "submission") == {"BATCH_SIZE=2"}
    assert {"MODEL_NAME=tiny-bloom", "TRAIN_SIZE=128"} <= knobs_from(lines, "site")
    assert knobs_from(lines, "experiment") == {"SAMPLES_PER_GPU=16", "EM_F1=False", "SAVE_STRATEGY=no"}
    assert "strategy: DeepSpeed ZeRO-2 on 2 ranks = 2 shards" in lines
    assert "NUM_EPOCHS=3" in knobs_from(lines, "default") and "OUTPUT_DIR" in knobs_from(lines, "unset")
    assert any(line.startswith("one GPU: ") and line.endswith("16 GiB there: fits") for line in lines)
    assert any(line.startswith("one node: ") and line.endswith(f"{MEMORY:.0f} GiB there: fits") for line in lines)
    assert files(workshop) == before


@pytest.mark.promise("reliability 9")
def test_a_dry_run_of_one_or_two_nodes_shows_two(workshop, sample):
    """Also, the GPUs are not the first resource in the list of --gres."""
    folder = workshop / "experiments/own/elastic"
    shutil.copytree(workshop / "experiments/fsdp-multi-node/2_nodes", folder)
    script = folder / "multi_node.slurm"
    elastic = script.read_text().replace("--nodes=2", "--nodes=1-2")
    script.write_text(re.sub(r"--gpus-per-node=\d+", "--gres=nvme:100,gpu:2", elastic))
    lines = dry_run(folder, MODEL_NAME="tiny-bloom", DATASET=sample).stdout.splitlines()
    assert lines[0] == "experiments/own/elastic: site laptop, 2 node(s) x 2 rank(s)"
    assert len([line for line in lines if line.startswith("srun --nodes=2 ")]) == 2, lines


def test_dry_run_has_no_effect_in_a_slurm_job(stub):
    done, folder = stub("print('training')", DRY_RUN=1, SLURM_JOB_ID=47)
    assert (done.returncode, done.stderr) == (0, "warning: DRY_RUN has no effect in a Slurm job\n")
    assert "training" in done.stdout.splitlines()
    assert os.listdir(folder / "cpu_memory")
