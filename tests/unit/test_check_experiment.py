"""check_experiment.py: what it refuses, the knobs that it reads of a script, and what it warns of before submission."""

import re
from pathlib import Path

import huggingface_hub.constants
import pytest

import check_experiment as checks
from check_experiment import check_experiment, gpu_memory, knobs_of, memory_warnings, requested_memory
from helpers import EXPERIMENTS, REPOSITORY, directives

# Mistakes in a script


@pytest.fixture
def written(tmp_path):
    """Writes a script below a folder, with a log/ beside it."""

    def write(path: str, text: str) -> Path:
        script = tmp_path / path
        (script.parent / "log").mkdir(parents=True)
        script.write_text(text)
        return script

    return write


@pytest.mark.parametrize(
    ("path", "text", "message"),
    [
        ("4_gpus/x.slurm", directives(1, 2), "4_gpus says 4 gpus, the #SBATCH lines say 2"),
        ("4_nodes/x.slurm", directives(2, 4), "4_nodes says 4 nodes, the #SBATCH lines say 2"),
        ("mine/deepspeed_4_gpus.slurm", directives(1, 2), "deepspeed_4_gpus.slurm says 4 gpus"),
        ("mine/x.slurm", "#!/bin/bash\n#SBATCH --nodes=1\n", "has no #SBATCH --nodes=N or --gpus-per-node=N"),
        ("mine/x.slurm", directives(1, 1) + 'run "$ROOT/ds_configs/zero9.json"\n', "zero9.json"),
        ("mine/x.slurm", directives(1, 2) + 'run "$ROOT/fsdp_configs/hybrid_shard_2x2.json"\n', "is for 4 ranks"),
    ],
)
def test_a_wrong_experiment_is_refused(refusal, written, path, text, message):
    assert message in refusal(check_experiment, written(path, text))


def test_an_experiment_without_log_or_script_is_refused(refusal, written):
    script = written("mine/x.slurm", directives(1, 1))
    (script.parent / "log").rmdir()
    assert "there is no log/ beside it; create it" in refusal(check_experiment, script)
    script.unlink()
    assert "there is no such experiment" in refusal(check_experiment, script)


@pytest.mark.parametrize("path", ["2_nodes/4_gpus/x.slurm", "2_gpus_stages_comparison/x.slurm"])
def test_a_right_experiment_is_not_refused(written, path):
    check_experiment(written(path, directives(2, 2) if "nodes" in path else directives(1, 2)))


def test_folders_above_the_repository_do_not_count(tmp_path, monkeypatch, written):
    """A user may keep the workshop in ~/8_gpus."""
    script = written("8_gpus/workshop/experiments/baseline/x.slurm", directives(1, 1))
    monkeypatch.setattr("check_experiment.REPOSITORY", tmp_path / "8_gpus/workshop")
    check_experiment(script)
    monkeypatch.chdir(script.parent)
    check_experiment(Path("x.slurm"))


def test_a_relative_path_is_checked_against_its_folder_too(refusal, monkeypatch, written):
    monkeypatch.chdir(written("4_gpus/x.slurm", directives(1, 2)).parent)
    assert "4_gpus says 4 gpus" in refusal(check_experiment, Path("x.slurm"))


def test_each_wrong_script_is_told_and_the_right_ones_are_passed_over(main_of, written, capsys):
    wrong = written("4_gpus/x.slurm", directives(1, 2))
    right = written("2_gpus/x.slurm", directives(1, 2))
    with pytest.raises(SystemExit) as ended:
        main_of(checks, wrong, right, "absent.slurm")
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert (printed.out, len(printed.err.splitlines())) == ("", 2)
    with pytest.raises(SystemExit) as ended:
        main_of(checks, right)
    assert ended.value.code == 0
    assert capsys.readouterr() == ("", "")


# The knobs that a script sets; all experiments, against bash itself: tests/commands/test_files.py


@pytest.mark.parametrize(
    ("lines", "given", "expected"),
    [
        (': "${A:=1}"', {}, {"A": "1"}),
        (': "${A:=1}"', {"A": "2"}, {"A": "2"}),
        (': "${A:=1}"', {"A": ""}, {"A": "1"}),
        (': "${A:=1}" "${B:=two words}"   "${C:=}"', {"B": "given"}, {"A": "1", "B": "given", "C": ""}),
        (': "${A:=1}" # "${B:=2}"', {}, {"A": "1"}),
        (": ${A:=1}", {}, {"A": "1"}),
        ('export A="two words"', {}, {"A": "two words"}),
        ("export A=1 B=2", {}, {"A": "1", "B": "2"}),
        (': "${A:=1}"\n: "${A:=2}"', {}, {"A": "1"}),
        (': "${A:=${SITE_A:-250}}" # nested', {}, {"A": "250"}),
        (': "${A:=${SITE_A:-250}}"', {"SITE_A": "7"}, {"SITE_A": "7", "A": "7"}),
        (': "${A:=${SITE_A:-250}}"', {"SITE_A": ""}, {"SITE_A": "", "A": "250"}),
        (': "${A:=${SITE_A}}"', {}, {"A": ""}),
        (': "${A:=1}"\n: "${B:=$A-${A}}"', {}, {"A": "1", "B": "1-1"}),
        (': "${A:=$ROOT/data/my.json}"', {}, {"A": f"{REPOSITORY}/data/my.json"}),
        ("export A=gpt # a comment", {"A": "given"}, {"A": "gpt"}),
        ('export A="gpt"', {}, {"A": "gpt"}),
        ("export A=$ROOT/x", {}, {"A": f"{REPOSITORY}/x"}),
        ('# : "${A:=1}"\necho "${A:=1}"\n#export A=1', {}, {}),
    ],
)  # fmt: skip
def test_knobs_of_a_script(written, lines, given, expected):
    script = written("mine/x.slurm", f"{directives(1, 1)}{lines}\n")
    assert knobs_of(script, given) == {"ROOT": str(REPOSITORY), **expected}
    assert "ROOT" not in given, "the environment that was given is left alone"


def test_knobs_of_env_vars_come_before_those_of_the_script(written):
    script = written("mine/x.slurm", ': "${A:=script}" "${B:=script}"\n')
    (script.parent / "env_vars.sh").write_text(': "${A:=env_vars}"\nexport MODEL_NAME=custom-gpt\n')
    found = knobs_of(script, {})
    assert (found["A"], found["B"], found["MODEL_NAME"]) == ("env_vars", "script", "custom-gpt")


# What will not fit


@pytest.mark.parametrize(
    ("line", "variable", "gib"),
    [
        ("#SBATCH --mem=64G", None, 64),
        ("#SBATCH --mem=64G  # per node", None, 64),
        ("#SBATCH --mem=2T", None, 2048),
        ("#SBATCH --mem=2048", None, 2),  # sbatch counts in MB
        ("#SBATCH --mem=512m", None, 0.5),
        ("#SBATCH --mem=1048576K", None, 1),
        ("#SBATCH --mem=64G", "96g", 96),
        ("", "96", 96 / 1024),
        ("", None, float("inf")),
        ("#SBATCH --mem=all", None, float("inf")),
    ],
)
def test_memory_that_a_job_asks_for(line, variable, gib, monkeypatch):
    if variable:
        monkeypatch.setenv("SBATCH_MEM_PER_NODE", variable)
    assert requested_memory(f"#!/bin/bash\n{line}\n") == gib


def test_memory_of_a_gpu_is_what_the_site_says(monkeypatch, refusal):
    assert gpu_memory() == float("inf")
    monkeypatch.setenv("GPU_MEMORY", "")
    assert gpu_memory() == float("inf")
    monkeypatch.setenv("GPU_MEMORY", "79.5")
    assert gpu_memory() == 79.5
    monkeypatch.setenv("GPU_MEMORY", "32GB")
    assert refusal(gpu_memory).startswith("error: GPU_MEMORY: '32GB' is no number of GiB; ")


@pytest.fixture
def warnings(monkeypatch):
    """The warnings for an experiment of the workshop on GPUs of 32 GiB."""

    def of(experiment: str, **variables: str) -> list[str]:
        for name, value in ({"GPU_MEMORY": "32"} | variables).items():
            monkeypatch.setenv(name, value)
        (script,) = (EXPERIMENTS / experiment).glob("*.slurm")
        return memory_warnings(script)

    return of


OFFLOAD = "deepspeed-single-gpu/cpu_offloading/zero_3"


def test_a_model_that_fits_is_not_warned_of(warnings):
    assert warnings("deepspeed-single-gpu/zero_1") == []
    assert warnings("deepspeed-single-gpu/zero_1", MODEL_NAME="tiny-bloom", GPU_MEMORY="1") == []


def test_a_model_that_does_not_fit_the_gpu_is_warned_of(warnings):
    (line,) = warnings("deepspeed-single-gpu/zero_1", MODEL_NAME="bigscience/bloom-3b")
    assert re.fullmatch(r"about \d+ GiB per GPU, and one has 32; lower BATCH_SIZE or MAX_LENGTH, .*", line)
    assert warnings("deepspeed-single-gpu/zero_1", GPU_MEMORY="") == [], "the site does not say how much there is"


def test_memory_of_the_node_is_warned_of_with_the_option_that_is_enough(warnings):
    (line,) = warnings(OFFLOAD, MODEL_NAME="bigscience/bloom-3b")
    found = re.fullmatch(
        r"about \d+ GiB per node, and the job asks for 32; set SBATCH_MEM_PER_NODE=(\d+G) \(sbatch --mem\)", line
    )
    for enough in (found[1], found[1].lower()):
        assert warnings(OFFLOAD, SBATCH_MEM_PER_NODE=enough) == []


def test_the_experiments_own_knobs_count(warnings):
    """This one trains the custom GPT, with a micro batch of its own."""
    (line,) = warnings("custom-model/weak_scaling/2_gpus", HIDDEN_SIZE="16384")
    assert re.match(r"about \d+ GiB per GPU, and one has 32; ", line)


def test_a_model_that_cannot_be_estimated_is_a_warning_and_no_error(warnings, monkeypatch):
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    (line,) = warnings("baseline", MODEL_NAME="nobody/nothing")
    assert line.startswith("memory is not estimated: --model_name: nobody/nothing is no local path")


def test_a_warning_names_the_experiment_as_submit_sh_takes_it(main_of, monkeypatch, capsys):
    monkeypatch.setenv("GPU_MEMORY", "1")
    with pytest.raises(SystemExit) as ended:
        main_of(checks, "--memory", EXPERIMENTS / "deepspeed-single-gpu/zero_1/deepspeed_zero1.slurm")
    assert ended.value.code == 0
    assert capsys.readouterr().err.startswith("warning: deepspeed-single-gpu/zero_1: about ")


@pytest.mark.parametrize("value", ["$((4*2))", "$(nproc)", "`nproc`"])
def test_a_knob_that_a_command_gives_is_not_guessed(written, refusal, value):
    script = written("mine/x.slurm", directives(1, 1) + f"export BATCH_SIZE={value}\n")
    assert "x.slurm: BATCH_SIZE: is " in refusal(knobs_of, script, {})
    (warning,) = memory_warnings(script)
    assert warning.startswith("memory is not estimated: ")
    assert "which only the job can tell; write its value, or give it when you submit" in warning


def test_a_variable_that_refers_to_itself_ends(written):
    script = written("mine/x.slurm", directives(1, 1) + 'export MODEL_NAME="$NAME" TOKENIZER_NAME=${OTHER:-${NAME}}\n')
    found = knobs_of(script, {"NAME": "a$NAME"})
    assert found["MODEL_NAME"] == "a$NAME"
    assert found["TOKENIZER_NAME"] == "a$NAME", "as bash does"
