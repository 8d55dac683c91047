"""Tests of experiments/job.sh without Slurm; the training is a few lines of Python.

tests/faults has more tests of signals and kills.
"""

import json
import os
import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from canaries import CANARIES, find_leaks
from helpers import until
from job.memory_logs import read_gpu_log
from records.schema import read_attempts, read_record
from shell import program, shell_environment, start_stub

PRINT = "import os, sys; print('>', *(os.environ.get(n, 'unset') for n in sys.argv[1:]), sep='|')"
IN_A_JOB = {"SLURM_JOB_ID": 47, "SLURM_JOB_NUM_NODES": 1}
CORES = len(os.sched_getaffinity(0))


def printed(done) -> list[str]:
    assert done.returncode == 0, done
    return next(line for line in done.stdout.splitlines() if line.startswith(">")).split("|")[1:]


# The site, which job.sh loads with load_site.sh


def test_a_variable_at_submission_wins_over_site_and_experiment(stub):
    names = ("TRAIN_SIZE", "EVAL_SIZE", "SAVE_STRATEGY", "WEIGHT_DECAY", "EXPERIMENT", "REQUIRE_GPU")
    lines = ': "${TRAIN_SIZE:=7}" "${EVAL_SIZE:=7}" "${SAVE_STRATEGY:=no}"'
    values = printed(stub(PRINT, *names, lines=lines, TRAIN_SIZE=9)[0])
    assert values == ["9", "32", "no", "unset", "experiments/mine/x", "0"]


@pytest.fixture
def site(workshop):
    """Run load_site.sh with a site file `moon` of this content. On success, it prints SITE and SEEN."""

    def run(content: str = "", mode: int = 0o644, **variables: object) -> subprocess.CompletedProcess:
        file = workshop / "experiments/sites/moon.sh"
        file.write_text(f"site_setup() {{ :; }}\n{content}\n")
        file.chmod(mode)
        command = [
            "bash",
            "experiments/load_site.sh",
            "sh",
            "-c",
            'echo "$SITE ${SEEN-unset}"; env | grep -c module || true',
        ]
        environment = shell_environment(**{"SITE": "moon"} | variables)
        return subprocess.run(command, cwd=workshop, env=environment, capture_output=True, text=True)

    return run


NO_SUCH_SITE = "error: SITE: there is no experiments/sites/{}.sh; choose "


@pytest.mark.parametrize(
    ("chosen", "content", "error"),
    [
        (None, "", "error: SITE: no site is chosen; choose "),
        ("../sites/laptop", "", NO_SUCH_SITE.format("../sites/laptop")),
        ("x; touch pwned", "", NO_SUCH_SITE.format("x; touch pwned")),
        ("moon", "export SBATCH_ACCOUNT=CHANGE_ME", "error: experiments/sites/moon.sh: it still holds CHANGE_ME; "),
        ("moon", "true\r", "error: experiments/sites/moon.sh: it has Windows line ends; remove them: sed -i "),
    ],
    ids=["none", "path", "code", "not filled in", "Windows"],
)
def test_a_missing_or_unusable_site_is_one_error_line(site, workshop, chosen, content, error):
    done = site(content, SITE=chosen)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(error) and done.stderr.count("\n") == 1
    assert not list(workshop.rglob("pwned*"))


def test_the_site_is_remembered_and_can_be_overridden(site, workshop):
    (workshop / "experiments/site").write_text("moon\r\n")
    assert site(SITE=None).stdout.startswith("moon ")
    assert site(SITE="laptop").stdout.startswith("laptop ")


SETS_A_SECRET = "export WANDB_API_KEY=canary", ': "${HF_TOKEN:=canary}"', "AWS_SECRET_ACCESS_KEY=c", "DB_PASSWORD=c"
SETS_A_SECRET += "hf_token=c", "PASS=c", "CREDENTIALS=c", "export https_proxy=http://me:c@proxy:3128"


@pytest.mark.promise("only their owner can read keys")
@pytest.mark.parametrize("line", SETS_A_SECRET)
def test_a_site_file_with_a_secret_must_be_private(site, line):
    error = "error: experiments/sites/moon.sh: it sets a secret, but other users may read it; run chmod 600 on it\n"
    for mode in (0o644, 0o640):
        done = site(line, mode)
        assert (done.returncode, done.stderr) == (3, error)
    assert site(line, 0o600).returncode == 0
    harmless = '# WANDB_API_KEY=mine\n: "${TOKENIZER_NAME:=x}" "${TOKENIZERS_PARALLELISM:=false}"\nbypass=1 http_proxy=http://proxy:80'
    assert site(harmless).returncode == 0


def test_a_sites_environment_scripts_may_use_unset_variables(site):
    """conda's activation script uses unset variables. Also, the site's functions are not exported to the training."""
    done = site('site_setup() { [ -z "$CONDA_UNSET" ] && module() { :; } && export SEEN=yes; }')
    assert done.stdout == "moon yes\n0\n", done


def test_a_site_that_fails_or_has_no_python_ends_the_job(stub, site):
    assert (site("site_setup() { false; }").returncode, site("site_setup() { false; }").stdout) == (1, "")
    site("site_setup() { PATH=/nowhere; }")
    done, folder = stub(PRINT, SITE="moon")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "error: experiments/sites/moon.sh: there is no python after site_setup; activate the environment there\n"
    )
    assert not (folder / "results").exists()


# The job


@pytest.mark.parametrize("linked", ["experiments/mine/x", "."], ids=["experiment", "repository"])
def test_a_job_runs_through_a_symbolic_link(stub, workshop, tmp_path, linked):
    link = tmp_path / "link"
    link.symlink_to(workshop / linked)
    cwd = link if linked != "." else link / "experiments/mine/x"
    # bash reads the path with the link from PWD, as it does after cd
    done, _ = stub(PRINT, "EXPERIMENT", "DATASET", cwd=cwd, PWD=cwd)
    assert printed(done) == ["experiments/mine/x", f"{workshop}/data/squad_sample.json"]


def test_a_failed_training_fails_its_job_and_keeps_its_log(stub, workshop):
    """Also, no file of the job holds a secret."""
    done, folder = stub("print('to stdout'); raise RuntimeError('to stderr')", **CANARIES)
    assert done.returncode == 1, done
    assert {"status: failed (exit code 1)", "to stdout"} <= set(done.stdout.splitlines())
    assert "RuntimeError: to stderr" in done.stderr and "to stderr" not in done.stdout
    (log,) = (folder / "log").glob("*_local-*.out")
    # tee may write this line after the job's end
    until(lambda: "missing: no run record: the job ended before the training began" in log.read_text())
    assert {"to stdout", "RuntimeError: to stderr"} <= set(log.read_text().splitlines())
    job_id = log.stem.partition("_")[2]
    assert {*(folder / "results").rglob("*")} == {folder / "results/jobs", folder / f"results/jobs/{job_id}.json"}
    assert find_leaks(workshop) == []
    assert not any(secret in done.stdout + done.stderr for secret in CANARIES.values())


@pytest.mark.parametrize(
    ("cpus", "gpus", "given", "expected"),
    [(4096, 1, None, CORES), (1, 1, None, 1), (4096, "a100:2", None, max(1, CORES // 2)), (64, 2, 5, 5), (64, 1, 1, 1)],
)
def test_threads_per_rank_equal_its_cpus(stub, cpus, gpus, given, expected):
    """The job gets as many CPUs as Slurm gives it, but not more than this machine has. Fewer threads are noted."""
    slurm = IN_A_JOB | {"SLURM_GPUS_PER_NODE": gpus, "SLURM_CPUS_ON_NODE": cpus, "SLURM_CPUS_PER_TASK": cpus}
    done, folder = stub(PRINT, "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK", OMP_NUM_THREADS=given, **slurm)
    assert printed(done) == [str(expected), str(cpus)]
    notes = re.findall("^OMP_NUM_THREADS=.*", done.stdout, re.MULTILINE)
    line = f"OMP_NUM_THREADS=1 from the submission: each rank has {CORES} CPUs; unset it first"
    assert read_attempts(folder / "results/47.json")[0].notes == notes == [line] * (given == 1 < CORES)
    assert done.stdout.startswith(f"job 47 of experiments/mine/x: site laptop, 1 node(s) x {str(gpus)[-1]} rank(s)")


def test_arguments_and_values_pass_unchanged(stub, workshop):
    code = "import os, sys, json; print('>', json.dumps([sys.argv[1:], os.environ['MODEL_NAME']]), sep='|')"
    arguments = ["a b", "$(touch pwned)", "`touch pwned`", "; touch pwned", "it's", '"', "*", ""]
    done, _ = stub(code, *arguments, MODEL_NAME="$(touch pwned); x 'y")
    assert json.loads(printed(done)[0]) == [arguments, "$(touch pwned); x 'y"]
    assert not list(workshop.rglob("pwned*"))


def test_the_next_job_completes_the_record_of_a_lost_job(stub, workshop):
    results = workshop / "experiments/mine/x/results"
    results.mkdir(parents=True)
    (results / ".gone").mkdir()
    (results / "gone.json").write_text('{"status": "running", "exit_code": null}')
    (results / "broken.json").write_text('{"status": "running"')
    done, _ = stub("print('training')")
    assert done.returncode == 0
    assert read_record(results / "gone.json").status == "failed"
    assert "results/gone.json: the job is gone, and its status is now failed" in done.stdout
    assert sorted(path.name for path in results.glob(".*")) == []


def test_several_nodes_need_slurm(workshop):
    folder = workshop / "experiments/deepspeed-multi-node/2_nodes"
    command = ["bash", "deepspeed_2_nodes.slurm"]
    done = subprocess.run(command, cwd=folder, env=shell_environment(), capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (3, "")
    assert re.fullmatch(r"error: deepspeed_2_nodes\.slurm: it needs 2 nodes, .*; .*sbatch\n", done.stderr)


def test_without_slurm_torchrun_starts_the_ranks_of_bare_srun(stub):
    code = "import os; os.write(1, f\"rank {os.environ['RANK']} of {os.environ['WORLD_SIZE']}\\n\".encode())"
    done, _ = stub(code, verb="run_srun", gpus=2)
    assert done.returncode == 0, done
    assert {"rank 0 of 2", "rank 1 of 2"} <= set(done.stdout.splitlines())


def test_a_partly_installed_environment_is_not_used(stub, workshop):
    """make leaves .venv without its stamp while it installs the packages."""
    program(workshop / ".venv/bin", "python", "exit 9")
    assert stub("print('training')")[0].returncode == 0
    (workshop / ".venv/installed").touch()
    assert stub("print('training')")[0].returncode == 3


# The loggers


@pytest.mark.parametrize(
    ("visible", "logged", "missing"),
    [
        ("1,2,3", "12", None),
        ("-1", "", "CUDA_VISIBLE_DEVICES is '-1' on {host}, the job sees no GPU: no log of GPU memory"),
        (None, "01234567", "CUDA_VISIBLE_DEVICES is unset on {host}: the GPU log holds all GPUs that nvidia-smi shows"),
    ],
    ids=["chosen", "none", "unset"],
)
def test_gpu_log_holds_the_gpus_that_the_ranks_use(stub, workshop, visible, logged, missing):
    """The training has two ranks and waits for one sample of each GPU. The site `laptop` would hide the GPUs."""
    (workshop / "experiments/sites/moon.sh").write_text("site_setup() { :; }\n")
    lines = "sum(len(log.read_text().splitlines()) for log in pathlib.Path('gpu_memory').glob('*'))"
    wait = f"import pathlib, time\nwhile {lines} < {len(logged) + 1 if logged else 0}: time.sleep(0.05)"
    done, folder = stub(wait, gpus=2, SITE="moon", CUDA_VISIBLE_DEVICES=visible)
    assert done.returncode == 0, done
    logs = list((folder / "gpu_memory").iterdir())
    assert [read_gpu_log(log).names() for log in logs] == ([list(logged)] if logged else [])
    said = [line for line in done.stdout.splitlines() if "CUDA_VISIBLE_DEVICES" in line]
    assert said == ([f"missing: {missing.format(host=os.uname().nodename)}"] if missing else [])


@pytest.mark.promise("a machine with one GPU, or with a driver that is too old, is a normal machine")
def test_a_laptop_gpu_is_hidden_unless_the_caller_selects_it(stub):
    """The GPU is hidden because a job with two ranks would need two GPUs."""
    hint = "GPUs are hidden from this job (site laptop); to use one, put CUDA_VISIBLE_DEVICES=0 before the command"
    done, _ = stub(PRINT, "CUDA_VISIBLE_DEVICES")
    assert printed(done) == [""]
    assert hint in done.stdout.splitlines()
    done, _ = stub(PRINT, "CUDA_VISIBLE_DEVICES", CUDA_VISIBLE_DEVICES=0)
    assert printed(done) == ["0"]
    assert hint not in done.stdout.splitlines()


# A stop


@pytest.mark.parametrize("verb", ["run_python", "run_torchrun"])
def test_unwritable_notes_do_not_change_the_exit_code(stub, verb):
    """Folders in place of the files simulate a full disk."""
    code = f"""
import os, pathlib
for name in ("exit_codes", "missing_{os.uname().nodename}"):
    path = pathlib.Path(os.environ["RUN_DIR"], name)
    path.unlink(missing_ok=True)
    path.mkdir()
raise SystemExit(75)"""
    done, _ = stub(code, verb=verb)
    assert (done.returncode, done.stderr) == (75, ""), done


def test_an_unprintable_summary_does_not_change_the_exit_code(stub):
    """/dev/full as the log simulates a full disk."""
    assert stub("raise SystemExit(75)", lines="exec &>/dev/full", **IN_A_JOB)[0].returncode == 75


def test_an_unresponsive_training_is_recorded_as_stopped(workshop):
    """To end a job, Slurm sends SIGTERM to all its processes and, some seconds later, SIGKILL."""
    folder = workshop / "experiments/mine/x"
    write = 'pathlib.Path(f"results/{os.environ[\'JOB_ID\']}.json").write_text(\'{"status": "running"}\')'
    code = f"import os, pathlib, signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n{write}\nsignal.pause()"
    started = start_stub(folder, code)
    try:
        (record,) = until(lambda: [path for path in (folder / "results").glob("*.json") if path.read_text()])
        started.send_signal(signal.SIGTERM)
        until(lambda: read_record(record).status == "stopped")
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()


@pytest.mark.parametrize(
    ("lines", "signals"), [("kill -TERM $$", ""), ("", "[[ $1 != */run_job.py ]] || { kill -TERM 0; kill -HUP 0; }")]
)
def test_a_signal_before_the_training_starts_ends_the_job(stub, tmp_path, lines, signals):
    """The signal comes before run_job.py starts, or all processes receive it while run_job.py starts."""
    program(tmp_path / "bin", "python", f'{signals}\nexec {sys.executable} "$@"')
    done, folder = stub("import signal; signal.pause()", lines=lines)
    assert done.returncode == 143
    assert "missing: a checkpoint of its end: SIGTERM came before the first step" in done.stdout
    assert "status: stopped (exit code 143)" in done.stdout
    assert [path.name for path in (folder / "results").iterdir()] == ["jobs"]


@pytest.mark.parametrize(
    ("sent", "variables", "requeued"),
    [
        ("USR1", {"REQUEUE": 1, "SLURM_RESTART_COUNT": 9}, True),
        ("USR1", {"REQUEUE": 1, "SLURM_RESTART_COUNT": 10}, False),  # MAX_RESTARTS is 10
        ("USR1", {}, False),
        ("TERM", {"REQUEUE": 1}, False),
    ],
)
def test_a_job_is_requeued_only_at_the_warning_signal(stub, tmp_path, sent, variables, requeued):
    program(tmp_path / "bin", "scontrol", f'echo "$*" >>"{tmp_path}/asked"')
    code = f"import os, signal\nsignal.signal(signal.SIG{sent}, lambda *_: os._exit(75))\n"
    code += f"os.kill(int(os.environ['SCRIPT']), signal.SIG{sent})\nsignal.pause()"
    done, _ = stub(code, lines="export SCRIPT=$$", **IN_A_JOB | variables)
    assert done.returncode == 75, done
    assert ("requeue 47" in Path(tmp_path / "asked").read_text().splitlines()) == requeued
    limit = "not requeued: this job was already restarted 10 times (MAX_RESTARTS)"
    assert (limit in done.stdout.splitlines()) == (variables.get("SLURM_RESTART_COUNT") == 10)


# A training that resumed at step 4, and that the warning ends before it can save a checkpoint of its end. It may have
# completed before
BEFORE_IT_SAVED = """
import json, os, pathlib, signal
for step in {steps}:
    folder = pathlib.Path(f"output/47/checkpoint-{{step}}")
    folder.mkdir(parents=True)
    (folder / "complete.json").write_text(json.dumps({{"job_id": {owner!r}}}))
record = {{"status": {status!r}, "job_id": "47", "attempt": 3}}
record |= {{"output_dir": "output/47", "resumed_from": "output/47/checkpoint-4"}}
pathlib.Path("results/47.json").write_text(json.dumps(record))
os.kill(int(os.environ["SCRIPT"]), signal.SIGUSR1)
signal.pause()
"""


@pytest.mark.promise("reliability 9")
@pytest.mark.parametrize(
    ("status", "steps", "owner", "requeued"),
    [
        ("running", (4,), "47", False),
        ("running", (4, 8), "47", True),
        ("running", (4, 8), "46", False),
        ("completed", (4, 8), "47", False),
    ],
)
def test_only_a_job_with_progress_that_has_not_completed_is_requeued(stub, tmp_path, status, steps, owner, requeued):
    """Checkpoints of another job in the same output folder do not count as progress of this one."""
    program(tmp_path / "bin", "scontrol", f'echo "$*" >>"{tmp_path}/asked"')
    code = BEFORE_IT_SAVED.format(status=status, steps=steps, owner=owner)
    done, folder = stub(code, lines="export SCRIPT=$$", REQUEUE=1, SLURM_RESTART_COUNT=2, **IN_A_JOB)
    expected = (0, "completed") if status == "completed" else (128 + signal.SIGUSR1, "stopped")
    assert (done.returncode, read_record(folder / "results/47.json").status) == expected, done
    assert ("requeue 47" in Path(tmp_path / "asked").read_text().splitlines()) == requeued
    no_progress = status == "running" and not requeued
    assert ("not requeued: this attempt saved no checkpoint" in done.stdout) == no_progress


def test_a_second_command_of_a_script_runs_after_the_first(stub):
    done, _ = stub("print('evaluation')", lines="run_torchrun -m this")
    assert done.returncode == 0, done
    first, second, _ = re.split("^status: completed.*", done.stdout, flags=re.MULTILINE)
    assert "The Zen of Python" in first and "evaluation" in second.splitlines()
    done, folder = stub("print('evaluation')", lines="run_python -c 'raise SystemExit(3)'")
    assert (done.returncode, "evaluation" in done.stdout) == (3, False)
    # After a restart, only the program whose record is completed does not run again
    (folder / "results/47.json").write_text('{"status": "completed", "command": ["x/code.py"]}')
    done, _ = stub("print('training')", lines="run_python -m this", SLURM_RESTART_COUNT=1, **IN_A_JOB)
    assert done.returncode == 0 and "The Zen of Python" in done.stdout, done
    assert "training" not in done.stdout.splitlines()


# The allocation of a job, from Slurm's variables

RANK = "import os; os.write(1, f\"rank {os.environ.get('RANK', 0)}\\n\".encode())"


@pytest.fixture
def batch(stub, workshop, tmp_path):
    """Run a job as sbatch does, from a copy of the script. scontrol names the script."""
    copy = tmp_path / "slurm_script"
    script = workshop / "experiments/mine/x/x.slurm"
    facts = f"printf '   OverSubscribe=%s\\n   Command=%s\\n' ${{OVERSUBSCRIBE-OK}} {shlex.quote(str(script))}"
    program(tmp_path / "bin", "scontrol", f"[[ $2 = hostnames ]] || {facts}")
    words = ("bash", "-c", 'cp x.slurm "$1"; exec bash "$1"', "bash", str(copy))
    return lambda **options: stub(RANK, words=words, SLURM_SUBMIT_DIR="/", **IN_A_JOB | options)


def test_a_job_with_whole_nodes_trains_on_the_gpus_that_it_requested(batch):
    """With --exclusive, Slurm allocates all GPUs of the node."""
    done, _ = batch(SLURM_GPUS_ON_NODE=4, SLURM_GPUS_PER_NODE=1, OVERSUBSCRIBE="NO")
    assert done.returncode == 0 and "rank 0" in done.stdout.splitlines(), done


def test_ranks_that_may_share_a_gpu_keep_the_number_of_the_script(stub):
    variables = {"SLURM_JOB_ID": 48, "SLURM_JOB_NUM_NODES": 1, "SLURM_GPUS_ON_NODE": 1, "RANKS_PER_GPU": 2}
    done, folder = stub(RANK, verb="run_torchrun", gpus=2, **variables)
    assert {"rank 0", "rank 1"} <= set(done.stdout.splitlines()), done
    assert read_attempts(folder / "results/48.json")[0].overrides == ["gpus-per-node: 1 instead of 2"]


@pytest.mark.promise("a job uses the nodes and GPUs that Slurm allocated")
@pytest.mark.parametrize(
    ("options", "line"),
    [
        ({"SLURM_GPUS_ON_NODE": 2}, "sbatch: 2 GPUs, but run_python trains on one; submit without this flag, or use "),
        (
            {"verb": "run_srun", "SLURM_JOB_NUM_NODES": 2, "SLURM_GPUS": "a100:3", "SLURM_GPUS_ON_NODE": 2},
            "--gpus: 3 GPUs on 2 nodes, of which this node has 2; give each node the same number, ",
        ),
    ],
    ids=["unused", "unequal"],
)
def test_gpus_that_no_rank_would_use_are_refused(batch, options, line):
    done, folder = batch(**options)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"error: {line}") and done.stderr.count("\n") == 1
    assert not (folder / "results").exists()


@pytest.mark.parametrize("verb", ["run_python", "run_torchrun"])
def test_a_script_of_one_node_uses_one_node_of_a_larger_allocation(stub, verb):
    """In a shell of salloc, bash runs the script itself."""
    done, _ = stub(RANK, verb=verb, **IN_A_JOB | {"SLURM_JOB_NUM_NODES": 2})
    assert done.returncode == 0, done
    assert {"rank 0", f"{verb} uses 1 of the 2 nodes of this job"} <= set(done.stdout.splitlines())
