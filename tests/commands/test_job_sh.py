"""experiments/job.sh, with a few lines of Python in place of a training, and no Slurm."""

import contextlib
import json
import os
import re
import signal

import pytest

from canaries import CANARIES, leaks
from job.finish import outcome
from shell import program, shell_environment, start_stub, until

PRINT = "import os, sys; print('>', *(os.environ.get(n, 'unset') for n in sys.argv[1:]), sep='|')"


def printed(done) -> list[str]:
    assert done.returncode == 0, done
    return next(line for line in done.stdout.splitlines() if line.startswith(">")).split("|")[1:]


def test_a_variable_at_submission_wins_over_site_and_experiment(stub):
    names = ("TRAIN_SIZE", "EVAL_SIZE", "SAVE_STRATEGY", "WEIGHT_DECAY", "EXPERIMENT", "REQUIRE_GPU")
    lines = ': "${TRAIN_SIZE:=7}" "${EVAL_SIZE:=7}" "${SAVE_STRATEGY:=no}"'
    values = printed(stub(PRINT, *names, lines=lines, TRAIN_SIZE=9)[0])
    assert values == ["9", "32", "no", "unset", "experiments/mine/x", "0"]


@pytest.mark.parametrize(
    ("site", "content", "message"),
    [
        (None, None, "no site is chosen"),
        ("moon", None, "there is no experiments/sites/moon.sh"),
        (None, "moon", "there is no experiments/sites/moon.sh"),
        ("../sites/laptop", None, "there is no experiments/sites/../sites/laptop.sh"),
        ("x; touch pwned", None, "there is no experiments/sites/x; touch pwned.sh"),
    ],
)
def test_a_missing_or_wrong_site_is_one_error_line(stub, workshop, site, content, message):
    if content:
        (workshop / "experiments/site").write_text(f"{content}\n")
    done, folder = stub("", SITE=site)
    assert done.returncode == 2
    assert re.fullmatch(rf"error: SITE: {re.escape(message)}; choose .*\n", done.stderr)
    assert done.stdout == ""
    assert not (folder / "results").exists()
    assert not list(workshop.rglob("pwned*"))


def test_the_site_is_remembered_and_can_be_overridden(stub, workshop):
    (workshop / "experiments/site").write_text("laptop\n")
    assert printed(stub(PRINT, "SITE", SITE=None)[0]) == ["laptop"]
    (workshop / "experiments/site").write_text("moon\n")
    assert printed(stub(PRINT, "SITE", SITE="laptop")[0]) == ["laptop"]


def test_no_file_of_a_job_that_fails_holds_a_secret(stub, workshop):
    done, folder = stub("raise RuntimeError('crash')", **CANARIES)
    assert done.returncode == 1, done
    assert "RuntimeError: crash" in done.stderr
    assert list(folder.glob("log/*.out"))
    assert leaks(workshop) == []
    assert not any(secret in done.stdout + done.stderr for secret in CANARIES.values())


SETS_A_SECRET = [
    "export WANDB_API_KEY=canary",
    ': "${HF_TOKEN:=canary}"',
    "AWS_SECRET_ACCESS_KEY=canary",
    "DB_PASSWORD=c",
]


@pytest.mark.parametrize("line", SETS_A_SECRET)
@pytest.mark.parametrize("mode", [0o644, 0o640, 0o600], ids=oct)
def test_a_site_file_with_a_secret_is_for_its_owner_alone(stub, workshop, line, mode):
    site = workshop / "experiments/sites/moon.sh"
    site.write_text(f'{line}\nsite_setup() {{ :; }}\n: "${{REQUIRE_GPU:=0}}"\n')
    site.chmod(mode)
    done, folder = stub("", SITE="moon")
    if mode == 0o600:
        assert done.returncode == 0, done.stderr
        return
    error = "error: experiments/sites/moon.sh: it sets a secret, and others may read it; chmod 600 it\n"
    assert (done.returncode, done.stderr) == (3, error)
    assert not (folder / "results").exists()


def test_a_site_file_without_a_secret_may_be_read_by_all(stub, workshop):
    text = '# WANDB_API_KEY=mine\n: "${TOKENIZER_NAME:=x}" "${TOKENIZERS_PARALLELISM:=false}" "${REQUIRE_GPU:=0}"\n'
    (workshop / "experiments/sites/moon.sh").write_text(f"{text}site_setup() {{ :; }}\n")
    assert printed(stub(PRINT, "TOKENIZER_NAME", SITE="moon")[0]) == ["x"]


def test_a_sites_environment_scripts_may_use_unset_variables(stub, workshop):
    """Those of conda do; and functions that they define are not exported to the training."""
    text = 'site_setup() { [ -z "$CONDA_UNSET" ] && module() { :; } && export SEEN=yes; }\n: "${REQUIRE_GPU:=0}"\n'
    (workshop / "experiments/sites/conda.sh").write_text(text)
    assert printed(stub(PRINT, "SEEN", "BASH_FUNC_module%%", SITE="conda")[0]) == ["yes", "unset"]


def test_a_failing_site_setup_ends_the_job(stub, workshop):
    (workshop / "experiments/sites/broken.sh").write_text("site_setup() { false; }\n")
    done, _ = stub(PRINT, SITE="broken")
    assert done.returncode == 1
    assert ">" not in done.stdout


def test_a_site_without_python_is_an_error_line(stub, workshop):
    (workshop / "experiments/sites/bare.sh").write_text("site_setup() { PATH=/nowhere; }\n")
    done, _ = stub(PRINT, SITE="bare")
    assert done.returncode == 3
    assert done.stderr == (
        "error: experiments/sites/bare.sh: there is no python after site_setup; activate the environment there\n"
    )


@pytest.mark.parametrize("code", [1, 2, 3, 75, 143])
def test_the_exit_status_is_the_trainings(stub, code):
    done, folder = stub(f"raise SystemExit({code})")
    assert done.returncode == code
    status = outcome(code)
    assert f"status: {status} (exit code {code})" in done.stdout
    assert "missing: no run record" in done.stdout
    assert not list((folder / "results").iterdir())


def test_a_killed_training_is_reported_as_128_plus_its_signal(stub):
    assert stub("import os; os.kill(os.getpid(), 9)")[0].returncode == 137


@pytest.mark.parametrize(("written", "code"), [(("completed", 0), 0), (("stopped", 75), 75), (("running", None), 137)])
def test_the_record_is_the_truth_where_the_launcher_says_0(stub, written, code):
    """srun does, of a stopped step whose ranks are slow to save."""
    record = json.dumps(dict(zip(("status", "exit_code"), written, strict=True)))
    write = "import os, pathlib; pathlib.Path(f\"results/{os.environ['JOB_ID']}.json\").write_text('%s')"
    done, folder = stub(write % record)
    (path,) = (folder / "results").glob("local-*.json")
    assert (done.returncode, json.loads(path.read_text())["exit_code"]) == (code, code)
    assert f"job {path.stem} of experiments/mine/x: site laptop, 1 node(s) x 1 rank(s)" in done.stdout


@pytest.mark.parametrize(
    ("cpus", "gpus", "given", "expected"),
    [(1, 1, None, 1), (64, 1, None, 64), (64, 2, None, 32), (64, "a100:4", None, 16), (1, 8, None, 1), (64, 2, 5, 5)],
)
def test_threads_are_the_cpus_of_a_rank(stub, tmp_path, cpus, gpus, given, expected):
    """nproc here is a stand-in of 256 CPUs; Slurm has given fewer."""
    program(tmp_path / "bin", "nproc", "echo 256")
    slurm = {"SLURM_JOB_ID": 47, "SLURM_JOB_NUM_NODES": 1, "SLURM_GPUS_PER_NODE": gpus, "SLURM_CPUS_ON_NODE": cpus}
    slurm |= {"PATH": f"{tmp_path}/bin:{shell_environment()['PATH']}", "OMP_NUM_THREADS": given}
    done, _ = stub(PRINT, "OMP_NUM_THREADS", "SRUN_CPUS_PER_TASK", **slurm, SLURM_CPUS_PER_TASK=cpus)
    assert printed(done) == [str(expected), str(cpus)]
    assert done.stdout.startswith(f"job 47 of experiments/mine/x: site laptop, 1 node(s) x {str(gpus)[-1]} rank(s)")


def test_never_more_threads_than_this_machine_has(stub):
    (threads,) = printed(stub(PRINT, "OMP_NUM_THREADS", SLURM_CPUS_ON_NODE=4096)[0])
    assert 1 <= int(threads) <= os.cpu_count()


def test_arguments_and_values_pass_unchanged(stub, workshop):
    code = "import os, sys, json; print('>', json.dumps([sys.argv[1:], os.environ['MODEL_NAME']]), sep='|')"
    arguments = ["a b", "$(touch pwned)", "`touch pwned`", "; touch pwned", "it's", '"', "*", ""]
    done, _ = stub(code, *arguments, MODEL_NAME="$(touch pwned); x 'y")
    assert json.loads(printed(done)[0]) == [arguments, "$(touch pwned); x 'y"]
    assert not list(workshop.rglob("pwned*"))


def test_loggers_that_end_with_the_training_are_no_gap(stub):
    """psrecord sees the end of the training by itself, sometimes before it is told to stop."""
    linger = "import time; time.sleep(1)"
    late = 'job_stop_loggers() { sleep 1; original "$@"; }'
    rename = 'eval "original() $(declare -f job_stop_loggers | tail -n +2)"'
    done, _ = stub(linger, lines=f"{rename}\n{late}")
    assert done.returncode == 0
    assert "CPU memory: peak" in done.stdout
    assert "missing: psrecord" not in done.stdout


def test_a_training_that_does_not_react_has_its_record_when_the_script_is_killed(workshop):
    """What Slurm does to a job: SIGTERM to all, SIGKILL to all some seconds later."""
    folder = workshop / "experiments/mine/x"
    write = 'pathlib.Path(f"results/{os.environ[\'JOB_ID\']}.json").write_text(\'{"status": "running"}\')'
    started = start_stub(
        folder,
        f"import os, pathlib, signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); {write}; time.sleep(600)",
    )
    try:
        (record,) = until(lambda: [path for path in (folder / "results").glob("*.json") if path.read_text()])
        started.send_signal(signal.SIGTERM)
        until(lambda: json.loads(record.read_text())["status"] != "running")
    finally:
        os.killpg(started.pid, signal.SIGKILL)
        started.communicate()
    assert json.loads(record.read_text())["status"] == "stopped"


def test_a_training_that_stops_slowly_is_waited_for(workshop):
    """75 is reserved for a run that saved a checkpoint when it was told to stop."""
    code = "import signal, sys, time; signal.signal(signal.SIGTERM, lambda *_: (time.sleep(1), sys.exit(75)))"
    started = start_stub(workshop / "experiments/mine/x", f"{code}; print('ready', flush=True); time.sleep(600)")
    try:
        while started.stdout.readline() != "ready\n":
            assert started.poll() is None
        started.send_signal(signal.SIGTERM)
        started.send_signal(signal.SIGINT)
        out, _ = started.communicate(timeout=60)
    finally:
        os.killpg(started.pid, signal.SIGKILL) if started.poll() is None else None
    assert started.returncode == 75
    assert "status: stopped (exit code 75)" in out


def test_a_signal_before_the_training_has_started_ends_it_too(stub):
    lines = "kill -TERM $$"
    done, folder = stub("import time; time.sleep(600)", lines=lines)
    assert done.returncode == 143
    assert "missing: a checkpoint of its end: SIGTERM came before the first step" in done.stdout
    assert "status: stopped (exit code 143)" in done.stdout
    assert not list((folder / "results").iterdir())


def test_without_slurm_the_log_is_kept_all_the_same(stub):
    done, folder = stub("import sys; print('to stdout'); print('to stderr', file=sys.stderr)")
    (log,) = (folder / "log").glob("*_local-*.out")
    until(lambda: "status: completed" in log.read_text())  # tee ends after the script
    assert {"to stdout", "to stderr"} <= set(log.read_text().splitlines())
    assert "to stdout" in done.stdout and "to stderr" in done.stderr and "to stderr" not in done.stdout


def test_optimizers_are_compiled_before_anything_is_measured(stub, tmp_path):
    """g++ would be the training's peak of CPU memory. The build fails here, and the training runs all the same."""
    broken = {"TORCH_EXTENSIONS_DIR": tmp_path / "extensions", "CXX": "/bin/false"}
    done, _ = stub("print('training')", "--deepspeed", "x.json", **broken)
    assert done.returncode == 0
    assert done.stdout.index("compiling fused_adam") < done.stdout.index("training\n")
    assert len([line for line in done.stderr.splitlines() if line.startswith("warning: ")]) == 3, "each is tried"
    done, _ = stub("print('training')", **broken)
    assert "compiling" not in done.stdout


def test_files_of_the_experiment_with_a_modules_name_are_not_taken_for_it(workshop):
    folder = workshop / "experiments/mine/x"
    folder.mkdir(parents=True)
    for name in ("errors.py", "json.py", "job.py"):
        (folder / name).write_text("raise SystemExit('not this one')\n")
    started = start_stub(folder, "print('training')")
    out, error = started.communicate(timeout=120)
    assert started.returncode == 0
    assert "status: completed (exit code 0)" in out
    assert "not this one" not in out + error


def test_without_a_free_port_the_job_ends_with_3_and_leaves_nothing(stub, tmp_path):
    taken = "import socket\n\ndef bind(*address):\n    raise OSError\n\nsocket.socket.bind = bind\n"
    (tmp_path / "sitecustomize.py").write_text(taken)
    done, folder = stub("print('training')", PYTHONPATH=tmp_path)
    assert done.returncode == 3
    assert "error: MASTER_PORT: no free port among 200; end other programs on this node, or exclude it" in done.stderr
    assert "status: failed (exit code 3)" in done.stdout
    assert not list((folder / "results").iterdir())


ENDLESS = "import time; print('ready', flush=True); time.sleep(600)"


def ready(folder, code: str = ENDLESS, **options):
    """An experiment whose training has begun."""
    started = start_stub(folder, code, **options)
    while started.stdout.readline() != "ready\n":
        assert started.poll() is None, started.communicate()
    return started


def end(started) -> tuple[str, str]:
    """What it printed to its end; nothing of it lives on."""
    try:
        return started.communicate(timeout=120)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(started.pid, signal.SIGKILL)


def test_a_training_that_ends_well_after_a_signal_is_completed(workshop):
    code = "import signal, sys; signal.signal(signal.SIGTERM, lambda *_: sys.exit(0)); "
    started = ready(workshop / "experiments/mine/x", code + ENDLESS)
    started.send_signal(signal.SIGTERM)
    out, _ = end(started)
    assert (started.returncode, "status: completed (exit code 0)" in out) == (0, True)


def test_the_second_attempt_appends_to_the_logs_of_the_first(stub):
    for _ in range(2):
        done, folder = stub("import time; time.sleep(1)", JOB_ID="again")
        assert done.returncode == 0
    (log,) = (folder / "cpu_memory").glob("*.txt")
    assert log.read_text().count("# Elapsed time") == 2


def test_what_was_submitted_otherwise_is_passed_on_to_the_record(stub):
    slurm = {"SLURM_JOB_ID": 47, "SLURM_JOB_NUM_NODES": 1, "SLURM_GPUS_PER_NODE": "a100:4"}
    assert printed(stub(PRINT, "JOB_OVERRIDES", **slurm)[0]) == ["gpus-per-node: 4 instead of 1"]
    assert printed(stub(PRINT, "JOB_OVERRIDES", gpus=4, **slurm)[0]) == [""]


def test_a_record_of_a_job_that_is_gone_is_finished_by_the_next_one(stub, workshop):
    results = workshop / "experiments/mine/x/results"
    results.mkdir(parents=True)
    (results / ".gone").mkdir()
    (results / "gone.json").write_text('{"status": "running", "exit_code": null}')
    (results / "broken.json").write_text('{"status": "running"')
    done, _ = stub("print('training')")
    assert done.returncode == 0
    assert json.loads((results / "gone.json").read_text())["status"] == "failed"
    assert "results/gone.json: its job is gone, the record says failed now" in done.stdout
    assert sorted(path.name for path in results.glob(".*")) == []
