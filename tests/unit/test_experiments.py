"""The experiment folders and the shell and Python around them, as far as no training and no Slurm is needed."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from check_experiment import check_experiment
from helpers import REPOSITORY
from job.finish import finish_record, outcome, summary
from knobs import KNOBS
from reporting.memory_logs import MemoryLog, read_cpu_log, read_gpu_log

EXPERIMENTS = REPOSITORY / "experiments"
FOLDERS = {
    "baseline": ["baseline.slurm"],
    "deepspeed-single-gpu": [
        *(f"zero_{stage}/deepspeed_zero{stage}.slurm" for stage in range(4)),
        *(f"cpu_offloading/zero_{stage}/deepspeed_zero{stage}_offload.slurm" for stage in (1, 2, 3)),
        "cpu_offloading/pinned_memory/deepspeed_zero2_offload_pinned_memory.slurm",
    ],
    "deepspeed-multi-gpu": [
        *(f"{gpus}_gpus/deepspeed_{gpus}_gpus.slurm" for gpus in (2, 4, 6, 8)),
        *(f"2_gpus_stages_comparison/zero_{stage}/deepspeed_2_gpus_zero{stage}.slurm" for stage in (1, 2, 3)),
        *(
            f"2_gpus_stages_comparison/cpu_offloading/zero_{stage}/deepspeed_2_gpus_zero{stage}_offload.slurm"
            for stage in (1, 2, 3)
        ),
    ],
    "deepspeed-multi-node": [f"{nodes}_nodes/deepspeed_{nodes}_nodes.slurm" for nodes in (2, 3, 4, 5, 6)],
    "deepspeed-native-launch": ["zero3_offload/run.slurm"],
    "fsdp-baseline": ["baseline.slurm"],
    "fsdp-single-gpu": [
        f"{name}/single_gpu.slurm" for name in ("full_shard", "cpu_offload", "activation_checkpointing")
    ],
    "fsdp-strategies": [
        f"{name}/strategies.slurm" for name in ("full_shard", "shard_grad_op", "hybrid_shard", "cpu_offload")
    ],
    "fsdp-multi-gpu": [f"{gpus}_gpus/multi_gpu.slurm" for gpus in (2, 4, 8)],
    "fsdp-multi-node": [f"{nodes}_nodes/multi_node.slurm" for nodes in (2, 4, 8)],
    "custom-model": [
        "single_node/single_node.slurm",
        *(f"multi_gpu/{gpus}_gpus/multi_gpu.slurm" for gpus in (2, 4, 8)),
        *(f"multi_node/{nodes}_nodes/multi_node.slurm" for nodes in (2, 4, 8)),
        *(f"weak_scaling/{gpus}_gpus/weak_scaling.slurm" for gpus in (2, 4, 8, 16)),
    ],
    "gpu-check": ["gpu_check.slurm"],
    "methods-comparison": [
        f"{name}/comparison.slurm" for name in ("ddp", "fsdp1", "fsdp2", "zero3", "zero3_offload")
    ],
}  # fmt: skip
SCRIPTS = sorted(EXPERIMENTS.rglob("*.slurm"))
CONFIG_FLAGS = {"deepspeed", "fsdp", "fsdp_config"}
SHORTEST_WAIT = 0.05


def relative(path: Path) -> str:
    return str(path.relative_to(EXPERIMENTS))


each_script = pytest.mark.parametrize("script", SCRIPTS, ids=relative)


# The folders


@pytest.mark.parametrize("family", FOLDERS)
def test_families_hold_the_experiments_of_the_documents(family):
    found = {str(path.relative_to(EXPERIMENTS / family)) for path in (EXPERIMENTS / family).rglob("*.slurm")}
    assert found == set(FOLDERS[family])


def test_there_is_no_other_experiment():
    assert {path.relative_to(EXPERIMENTS).parts[0] for path in SCRIPTS} == set(FOLDERS)


@each_script
def test_a_script_is_correct_bash(script):
    assert subprocess.run(["bash", "-n", script], check=False, capture_output=True, text=True).stderr == ""


@each_script
def test_a_script_sources_the_library_beside_it(script):
    """Relative to the folder: Slurm runs a copy in its spool, started in the submit directory."""
    sourced = re.findall(r"^source (\S*job\.sh)$", script.read_text(), re.MULTILINE)
    assert [(script.parent / path).resolve() for path in sourced] == [EXPERIMENTS / "job.sh"]


@each_script
def test_a_script_ends_in_its_training_with_the_users_arguments_last(script):
    """A knob as a flag would win over the variable that a user gives at submission."""
    training = script.read_text().rstrip().splitlines()[-1]
    assert re.match(r'run_(python|torchrun|srun) "\$ROOT/scripts/\w+\.py" ', training)
    assert training.endswith(' "$@"')
    flags = set(re.findall(r"--([\w-]+)", training))
    assert flags <= CONFIG_FLAGS, "knobs belong into variables"
    knobs = {variable for variable, _, _ in KNOBS}
    for line in script.read_text().splitlines():
        assigned = re.match(r"(?:export )?([A-Z][A-Z_0-9]+)=", line)
        assert not assigned or assigned[1] not in knobs, f'write : "${{{assigned[1]}:=...}}"'


@each_script
def test_names_directives_and_configs_agree(script):
    check_experiment(script)
    text = script.read_text()
    assert f"sbatch {script.name}" in text, "the purpose names the command"
    assert "#SBATCH --output=log/%x_%j.out" in text
    assert re.search(r"^#SBATCH --time=\S+", text, re.MULTILINE)
    assert not re.search(r"^#SBATCH --(account|partition|reservation|constraint|chdir)", text, re.MULTILINE)


@each_script
def test_the_log_folder_is_tracked_and_its_content_is_not(script):
    ignored = script.parent / "log" / ".gitignore"
    assert ignored.exists(), "Slurm fails a job whose log it cannot open"
    listed = subprocess.run(["git", "ls-files", ignored], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    if listed.returncode == 0:
        assert listed.stdout
        checked = ["git", "check-ignore", "--quiet", script.parent / "log" / "x_1.out"]
        assert subprocess.run(checked, cwd=REPOSITORY, check=False).returncode == 0


@each_script
def test_several_nodes_begin_with_the_bandwidth_test(script):
    several = int(re.search(r"^#SBATCH --nodes=(\d+)", script.read_text(), re.MULTILINE)[1]) > 1
    assert bool(re.search(r"^check_bandwidth$", script.read_text(), re.MULTILINE)) == several


def test_documented_network_settings_are_in_the_site_template():
    text = (EXPERIMENTS / "sites" / "example.sh").read_text()
    names = "NCCL_SOCKET_IFNAME NCCL_IB_HCA NCCL_ALGO NCCL_NET_GDR_LEVEL"
    names += " TORCH_NCCL_ASYNC_ERROR_HANDLING TORCH_NCCL_BLOCKING_WAIT MIN_BANDWIDTH"
    for name in names.split():
        assert re.search(rf'^(# )?: "\$\{{{name}:=\S+\}}"', text, re.MULTILINE), name


# check_experiment.py


@pytest.fixture
def written(tmp_path):
    """Writes a script below a folder, with a log/ beside it."""

    def write(path: str, text: str) -> Path:
        script = tmp_path / path
        (script.parent / "log").mkdir(parents=True)
        script.write_text(text)
        return script

    return write


def directives(nodes: int, gpus: int) -> str:
    return f"#!/bin/bash\n#SBATCH --nodes={nodes}\n#SBATCH --gpus-per-node={gpus}\n"


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


# memory_logs.py

GPU_HEADER = "timestamp, index, name, memory.used [MiB], memory.total [MiB]\n"
CPU_HEADER = "# Elapsed time   CPU (%)     Real (MB)   Virtual (MB)\n"


def gpu_line(index: int, used: object, unit: str = "") -> str:
    return f"2026/01/31 10:00:00.123, {index}, NVIDIA H200, {used}{unit}, 143771{unit}\n"


@pytest.mark.parametrize(
    ("text", "samples", "problems"),
    [
        (GPU_HEADER + gpu_line(0, 3) + gpu_line(0, 512), {"0": [3, 512]}, 0),
        (GPU_HEADER + gpu_line(0, 3, " MiB"), {"0": [3]}, 0),
        (GPU_HEADER + gpu_line(0, 1) + gpu_line(1, 2) + gpu_line(0, 3), {"0": [1, 3], "1": [2]}, 0),
        (GPU_HEADER + gpu_line(10, 1) + gpu_line(2, 2), {"10": [1], "2": [2]}, 0),
        (GPU_HEADER + gpu_line(0, 1) + GPU_HEADER + gpu_line(0, 2), {"0": [1, 2]}, 1),
        (GPU_HEADER + gpu_line(0, 1) + "\n" + gpu_line(0, 2), {"0": [1, 2]}, 0),
        (GPU_HEADER + gpu_line(0, "[N/A]") + gpu_line(1, 2), {"1": [2]}, 1),
        (GPU_HEADER + gpu_line(0, 700) + gpu_line(0, 900)[:44], {"0": [700]}, 1),
        (GPU_HEADER + gpu_line(0, 700)[:30] + GPU_HEADER + gpu_line(0, 5), {"0": [5]}, 1),
        (GPU_HEADER, {}, 0),
        ("", {}, 0),
        ("NVIDIA-SMI has failed because it couldn't communicate with the NVIDIA driver.\n", {}, 1),
        (GPU_HEADER + "\0\0\0\n" + gpu_line(0, 2), {"0": [2]}, 1),
    ],
    ids=["plain", "units", "two GPUs", "index 10", "header again", "empty line", "no value", "cut", "cut, restarted",
         "header only", "empty", "no driver", "zeros after a crash"],
)  # fmt: skip
def test_wild_gpu_logs(tmp_path, text, samples, problems):
    path = tmp_path / "gpu.csv"
    path.write_text(text)
    log = read_gpu_log(path)
    assert log.samples == samples
    assert len(log.problems) == problems
    assert all(
        re.match(rf"{re.escape(str(path))}:\d+: (no sample|another header)", problem) for problem in log.problems
    )


@pytest.mark.parametrize("length", range(len(gpu_line(0, 700)) + 1))
def test_a_line_cut_anywhere_gives_its_value_or_none(tmp_path, length):
    path = tmp_path / "gpu.csv"
    path.write_text(GPU_HEADER + gpu_line(0, 700)[:length])
    assert read_gpu_log(path).samples in ({}, {"0": [700]})


@pytest.mark.parametrize(
    ("text", "samples", "problems"),
    [
        (CPU_HEADER + " 0.0 10.0 100.5 4000.0\n 1.0 0.0 99.5 4000.0\n", [100.5, 99.5], 0),
        (CPU_HEADER + " 0.0 10.0 100.5 4000.0\n 1.0 0.0 99", [100.5], 1),
        (CPU_HEADER + " 0.0 10.0 1.0 4000.0\n" + CPU_HEADER + " 0.0 10.0 2.0 4000.0\n", [1, 2], 1),
        (CPU_HEADER, None, 0),
        ("", None, 0),
    ],
    ids=["plain", "cut", "header again", "header only", "empty"],
)
def test_wild_cpu_logs(tmp_path, text, samples, problems):
    path = tmp_path / "cpu.txt"
    path.write_text(text)
    log = read_cpu_log(path)
    assert log.samples == ({"process": samples} if samples else {})
    assert len(log.problems) == problems


def test_peak_and_mean():
    log = MemoryLog(Path("gpu.csv"), {"0": [1.0, 4.0, 1.0]})
    assert (log.peak("0"), log.mean("0")) == (4, 2)


# launch.py


def test_a_malformed_time_out_is_refused(command):
    run = command("launch.py", "--nproc-per-node=1", "x.py", JOIN_TIMEOUT="soon")
    assert run.code == 2
    assert run.error_lines == [
        "error: JOIN_TIMEOUT: 'soon' is no number of seconds; give a whole number, for example 300"
    ]


# finish.py


@pytest.mark.parametrize(
    ("code", "status"),
    [
        (0, "completed"),
        (1, "failed"),
        (2, "failed"),
        (137, "failed"),
        (143, "stopped"),
        (130, "stopped"),
        (75, "stopped"),
    ],
)
def test_status_follows_the_exit_code(code, status):
    assert outcome(code) == status


@pytest.mark.parametrize(
    ("before", "given", "code", "after"),
    [
        # what the training wrote, what job.sh knows, and what stands in the end
        (("running", None), None, 137, ("failed", 137)),
        (("running", None), None, 0, ("completed", 0)),
        (("running", None), "stopped", 143, ("stopped", 143)),
        (("running", None), "timeout", 143, ("timeout", 143)),
        (("completed", 0), None, 0, ("completed", 0)),
        (("completed", 0), None, 1, ("failed", 1)),
        (("failed", 3), None, 3, ("failed", 3)),
        (("failed", 1), None, 137, ("failed", 137)),
        (("stopped", 143), "timeout", 143, ("timeout", 143)),
        (("stopped", 143), None, 137, ("failed", 137)),
        (("oom", 1), None, 1, ("oom", 1)),
        (("oom", 1), None, 143, ("oom", 143)),
    ],
)
def test_the_end_of_a_record(tmp_path, before, given, code, after):
    path = tmp_path / "1.json"
    path.write_text(json.dumps({"status": before[0], "exit_code": before[1], "other": "kept"}))
    record = finish_record(path, given, code)
    assert (record["status"], record["exit_code"]) == after
    assert json.loads(path.read_text()) == record
    assert record["other"] == "kept"


def test_summary_of_a_job_is_not_that_of_its_neighbours():
    """Job 47 of two nodes beside jobs 471 and 4."""
    for kind, suffix in (("gpu", "csv"), ("cpu", "txt")):
        Path(f"{kind}_memory").mkdir()
        for name in ("4", "47_node1", "47_node2", "471", "471_node1"):
            lines = gpu_line(0, len(name)) if kind == "gpu" else f"0.0 0.0 {len(name)} 9.0\n"
            Path(f"{kind}_memory/{kind}_memory_log_{name}.{suffix}").write_text(lines)
    lines = summary("47", None, "failed", 2, [])
    assert [line.split(":")[0] for line in lines[1:5]] == [
        "GPU 0 memory on node1",
        "GPU 0 memory on node2",
        "CPU memory on node1",
        "CPU memory on node2",
    ]
    assert lines[5:] == ["missing: no run record: the job ended before the training began"]
    assert [line.split(":")[0] for line in summary("4", None, "failed", 2, [])[1:3]] == ["GPU 0 memory", "CPU memory"]


# job.sh, with a few lines of Python in place of a training


@pytest.fixture
def workshop(tmp_path):
    """A copy of the code under a path that a careless shell script would trip over, with one experiment `mine/x`."""
    root = tmp_path / 'it\'s $HOME; a "shop"'
    unwanted = shutil.ignore_patterns("__pycache__", "results", "output", "[cg]pu_memory", "*.out")
    for name in ("scripts", "ds_configs", "fsdp_configs", "data", "experiments"):
        shutil.copytree(REPOSITORY / name, root / name, ignore=unwanted)
    (root / "experiments/site").unlink(missing_ok=True)
    return root


@pytest.fixture
def stub(workshop):
    """Runs an experiment whose training is `code`, without Slurm; gives the finished process and the folder."""

    def run(code: str, *arguments: str, lines: str = "", gpus: int = 1, **variables: object):
        folder = workshop / "experiments/mine/x"
        started = start_stub(folder, code, *arguments, lines=lines, gpus=gpus, **variables)
        out, error = started.communicate(timeout=120)
        return subprocess.CompletedProcess(code, started.returncode, out, error), folder

    return run


def start_stub(folder: Path, code: str, *arguments: str, lines: str = "", gpus: int = 1, **variables: object):
    (folder / "log").mkdir(parents=True, exist_ok=True)
    (folder / "code.py").write_text(code)
    body = f'source ../../job.sh\n{lines}\nrun_python code.py "$@"\n'
    (folder / "x.slurm").write_text(directives(1, gpus) + body)
    command, streams = ["bash", "x.slurm", *arguments], {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    environment = shell_environment(**variables)
    return subprocess.Popen(command, cwd=folder, env=environment, text=True, start_new_session=True, **streams)


def shell_environment(**variables: object) -> dict[str, str]:
    path = f"{REPOSITORY}/tests/slurm/bin:{Path(sys.executable).parent}:/usr/bin:/bin"
    values = {"PATH": path, "HOME": os.environ["HOME"], "SITE": "laptop", "LOG_INTERVAL": "0.2"} | variables
    return {name: str(value) for name, value in values.items() if value is not None}


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


def test_a_finished_record_is_in_the_results(stub):
    write = "import os, pathlib; pathlib.Path(f\"results/{os.environ['JOB_ID']}.json\").write_text('%s')"
    done, folder = stub(write % json.dumps({"status": "running", "exit_code": None}))
    (path,) = (folder / "results").glob("local-*.json")
    assert json.loads(path.read_text()) == {
        "status": "completed",
        "exit_code": 0,
        "finished": json.loads(path.read_text())["finished"],
    }
    assert f"job {path.stem} of experiments/mine/x: site laptop, 1 node(s) x 1 rank(s)" in done.stdout


@pytest.mark.parametrize(
    ("cpus", "gpus", "given", "expected"),
    [(1, 1, None, 1), (64, 1, None, 64), (64, 2, None, 32), (64, "a100:4", None, 16), (1, 8, None, 1), (64, 2, 5, 5)],
)
def test_threads_are_the_cpus_of_a_rank(stub, tmp_path, cpus, gpus, given, expected):
    """nproc here is a stand-in of 256 CPUs; Slurm has given fewer."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin/nproc").write_text("#!/bin/sh\necho 256\n")
    (tmp_path / "bin/nproc").chmod(0o755)
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


DEAF = """#!/bin/bash
heard=0
trap 'heard=$((heard + 1)); [[ $heard -lt 3 ]] || exit 0' TERM
[[ $1 = -L ]] && echo "GPU 0: Tesla V100-SXM2-32GB (UUID: GPU-1)" && exit
echo "timestamp, index, name, memory.used [MiB], memory.total [MiB]"
while :; do sleep 0.05; done
"""


def test_a_logger_that_misses_its_first_signal_is_ended_all_the_same(stub, tmp_path):
    """One that is told to stop before its exec runs the script's own trap, and goes on."""
    (tmp_path / "deaf").mkdir()
    (tmp_path / "deaf/nvidia-smi").write_text(DEAF)
    (tmp_path / "deaf/nvidia-smi").chmod(0o755)
    done, _ = stub("print('training')", lines=f"PATH={tmp_path}/deaf:$PATH")
    assert done.returncode == 0
    assert "missing: nvidia-smi" not in done.stdout


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


def until(condition, timeout: float = 60):
    deadline = time.monotonic() + timeout
    while not (value := condition()):
        assert time.monotonic() < deadline
        time.sleep(SHORTEST_WAIT)
    return value


def test_a_signal_before_the_training_has_started_ends_it_too(stub):
    lines = "kill -TERM $$"
    done, folder = stub("import time; time.sleep(600)", lines=lines)
    assert done.returncode == 143
    assert "status: stopped (exit code 143)" in done.stdout
    assert not list((folder / "results").iterdir())


def test_without_slurm_the_log_is_kept_all_the_same(stub):
    done, folder = stub("import sys; print('to stdout'); print('to stderr', file=sys.stderr)")
    (log,) = (folder / "log").glob("*_local-*.out")
    end = time.monotonic() + 10
    while "status: completed" not in log.read_text() and time.monotonic() < end:
        time.sleep(0.05)  # tee ends after the script
    assert {"to stdout", "to stderr"} <= set(log.read_text().splitlines())
    assert "to stdout" in done.stdout and "to stderr" in done.stderr and "to stderr" not in done.stdout


def test_optimizers_are_compiled_before_anything_is_measured(stub, tmp_path):
    """g++ would be the training's peak of CPU memory. The build fails here, and the training runs all the same."""
    broken = tmp_path / "not a folder"
    broken.touch()
    done, _ = stub("print('training')", "--deepspeed", "x.json", TORCH_EXTENSIONS_DIR=broken)
    assert done.returncode == 0
    assert done.stdout.index("compiling fused_adam, cpu_adam") < done.stdout.index("training\n")
    assert len([line for line in done.stderr.splitlines() if line.startswith("warning: ")]) == 3, "each is tried"
    done, _ = stub("print('training')", TORCH_EXTENSIONS_DIR=broken)
    assert "compiling" not in done.stdout


# submit.sh


@pytest.fixture
def submit(workshop, tmp_path):
    """Runs submit.sh with a stand-in for sbatch that numbers the jobs and notes folder, arguments and variables."""
    (tmp_path / "bin").mkdir()
    noted = tmp_path / "noted"
    text = f"""#!/bin/bash
printf '%s\\0' "$PWD" "${{SITE-}} ${{SBATCH_ACCOUNT-}} ${{SNAPSHOT-}} ${{MODEL_NAME-}}" "$*" >>'{noted}'
echo "$(($(tr -cd '\\0' <'{noted}' | wc -c) / 3));cluster"
"""
    (tmp_path / "bin/sbatch").write_text(text)
    (tmp_path / "bin/sbatch").chmod(0o755)

    def run(*arguments: str, cwd: str = "", **variables: object):
        environment = shell_environment(**variables)
        environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
        command = [workshop / "experiments/submit.sh", *arguments]
        done = subprocess.run(
            command, cwd=workshop / cwd, env=environment, capture_output=True, text=True, check=False, timeout=300
        )
        words = noted.read_text().split("\0")[:-1] if noted.exists() else []
        return done, [tuple(words[i : i + 3]) for i in range(0, len(words), 3)]

    return run


STAGES = "deepspeed-single-gpu/cpu_offloading"


def test_dry_run_shows_the_exact_lines(submit, workshop):
    (workshop / "experiments/sites/moon.sh").write_text(
        'export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-a b}" SBATCH_PARTITION=gpu\n'
    )
    done, submitted = submit("--dry-run", "--chain", STAGES, SITE="moon")
    assert (done.returncode, done.stderr, submitted) == (0, "", [])
    folder = subprocess.check_output(
        ["bash", "-c", 'printf %q "$1"', "-", workshop / "experiments" / STAGES], text=True
    )
    settings = "SBATCH_ACCOUNT=a\\ b SBATCH_PARTITION=gpu SITE=moon"
    chained = "sbatch --parsable --dependency=afterany:<id of the line above>"
    assert done.stdout.splitlines() == [
        f"cd {folder}/pinned_memory && {settings} sbatch --parsable deepspeed_zero2_offload_pinned_memory.slurm",
        f"cd {folder}/zero_1 && {settings} {chained} deepspeed_zero1_offload.slurm",
        f"cd {folder}/zero_2 && {settings} {chained} deepspeed_zero2_offload.slurm",
        f"cd {folder}/zero_3 && {settings} {chained} deepspeed_zero3_offload.slurm",
    ]


def test_a_line_of_the_dry_run_does_what_it_says(submit, tmp_path):
    done, _ = submit("--dry-run", "baseline", SITE="laptop", SBATCH_ACCOUNT="$(touch pwned) x")
    environment = shell_environment(SITE=None)
    environment["PATH"] = f"{tmp_path}/bin:{environment['PATH']}"
    subprocess.run(["bash", "-c", done.stdout], env=environment, check=True, capture_output=True)
    folder, values, arguments = (tmp_path / "noted").read_text().split("\0")[:3]
    assert folder.endswith("experiments/baseline")
    assert (values.strip(), arguments) == ("laptop $(touch pwned) x", "--parsable baseline.slurm")


def test_a_chain_waits_for_the_job_before(submit, workshop):
    done, submitted = submit("--chain", STAGES, MODEL_NAME="bigscience/bloom-3b")
    assert done.returncode == 0, done.stderr
    assert [arguments.rpartition(" ")[0] for _, _, arguments in submitted] == [
        "--parsable",
        *(f"--parsable --dependency=afterany:{number}" for number in (1, 2, 3)),
    ]
    folders = ["pinned_memory", "zero_1", "zero_2", "zero_3"]
    assert [folder for folder, _, _ in submitted] == [str(workshop / "experiments" / STAGES / name) for name in folders]
    assert {values.split() == ["laptop", "bigscience/bloom-3b"] for _, values, _ in submitted} == {True}
    assert done.stdout.splitlines()[0].split("  ") == [
        "1",
        f"experiments/{STAGES}/pinned_memory/deepspeed_zero2_offload_pinned_memory.slurm",
    ]


@pytest.mark.parametrize(
    ("target", "cwd", "count"),
    [
        (STAGES, "", 4),
        (f"experiments/{STAGES}/", "", 4),
        (f"{STAGES}/zero_1", "experiments", 1),
        ("cpu_offloading", "experiments/deepspeed-single-gpu", 4),
        (".", "experiments/deepspeed-single-gpu/cpu_offloading", 4),
        ("../zero_0", "experiments/deepspeed-single-gpu/cpu_offloading", 1),
        ("all", "experiments/baseline", len(SCRIPTS)),
    ],
)
def test_a_target_is_a_family_a_folder_or_a_path(submit, target, cwd, count):
    done, submitted = submit(target, cwd=cwd)
    assert done.returncode == 0, done.stderr
    assert len({(folder, arguments) for folder, _, arguments in submitted}) == count
    assert all(Path(folder, arguments.split()[-1]).exists() for folder, _, arguments in submitted)


def test_a_snapshot_is_frozen_once_for_all_and_knows_its_commit(submit, workshop):
    for arguments in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "x"]):
        identity = ["-c", "user.name=test", "-c", "user.email=test@example.org"]
        subprocess.run(["git", *identity, *arguments], cwd=workshop, check=True)
    (workshop / ".venv/bin").mkdir(parents=True)
    (workshop / ".venv/bin/python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (workshop / ".venv/bin/python").chmod(0o755)
    done, submitted = submit("--snapshot", STAGES)
    assert done.returncode == 0, done.stderr
    (folder,) = (workshop / "snapshots").iterdir()
    assert {str(folder) in values for _, values, _ in submitted} == {True}
    for name in ("scripts/train.py", f"experiments/{STAGES}/pinned_memory", "ds_configs/zero2.json", "fsdp_configs"):
        assert (folder / name).exists()
    head = subprocess.check_output(["git", "rev-parse", "HEAD"], cwd=workshop, text=True).strip()
    assert json.loads((folder / "git.json").read_text()) == {"commit": head, "dirty": True}  # .venv is untracked here
    assert (folder / ".venv/bin/python").exists(), "a site finds the environment in $ROOT"


def test_nothing_is_submitted_without_a_whole_snapshot(submit, workshop):
    shutil.rmtree(workshop / "data")
    done, submitted = submit("--snapshot", "baseline")
    assert (done.returncode, submitted) == (2, [])
    assert re.search(r"^error: \S.*: the snapshot is not complete; ", done.stderr, re.MULTILINE)


@pytest.mark.parametrize(
    ("arguments", "site", "message"),
    [
        (["nope"], "laptop", r"error: nope: there is no such folder below experiments/; see ls experiments"),
        (["sites"], "laptop", r"error: sites: it holds no \.slurm file; see ls experiments"),
        ([], "laptop", r"error: submit\.sh: nothing to submit; .*"),
        (["a", "b"], "laptop", r"error: b: one target at a time; see --help"),
        (["--cain", "baseline"], "laptop", r"error: --cain: unknown option; see --help"),
        (["baseline"], None, r"error: SITE: no site is chosen; .*"),
        (["baseline"], "moon", r"error: SITE: there is no experiments/sites/moon\.sh; .*"),
        (["baseline"], "example", r"error: experiments/sites/example\.sh: it still holds CHANGE_ME; .*"),
        (["baseline"], "unset", r"error: experiments/sites/unset\.sh: bash cannot source it, .*"),
        (["baseline"], "syntax", r"error: experiments/sites/syntax\.sh: bash cannot source it, .*"),
    ],
)
def test_what_cannot_be_submitted_is_one_error_line(submit, workshop, arguments, site, message):
    (workshop / "experiments/sites/unset.sh").write_text(': "$NOT_SET"\n')
    (workshop / "experiments/sites/syntax.sh").write_text("if\n")
    done, submitted = submit(*arguments, SITE=site)
    assert (done.returncode, done.stdout, submitted) == (2, "", [])
    lines = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(lines) == 1, done.stderr
    assert re.fullmatch(message, lines[0])


def test_what_will_not_fit_is_said_and_submitted(submit, workshop):
    (workshop / "experiments/sites/moon.sh").write_text(': "${GPU_MEMORY:=32}"\nsite_setup() { :; }\n')
    done, submitted = submit("deepspeed-single-gpu/zero_1", SITE="moon", MODEL_NAME="bigscience/bloom-3b")
    assert (done.returncode, len(submitted)) == (0, 1)
    assert re.search(r"warning: deepspeed-single-gpu/zero_1: about \d+ GiB per GPU, and one has 32; lower", done.stderr)
    done, _ = submit(f"{STAGES}/zero_3", SITE="moon", MODEL_NAME="bigscience/bloom-3b")
    assert re.search(r"about \d+ GiB per node, and the job asks for 32; set SBATCH_MEM_PER_NODE=\d+G", done.stderr)
    done, _ = submit("deepspeed-single-gpu/zero_1", SITE="moon")
    assert done.stderr == ""
    # the experiment's own knobs count: this one trains the custom GPT with a micro batch of its own
    done, _ = submit("custom-model/weak_scaling/2_gpus", SITE="moon", HIDDEN_SIZE=16384)
    assert "weak_scaling/2_gpus: about" in done.stderr
    for enough in ("96G", "96g"):
        done, _ = submit(f"{STAGES}/zero_3", SITE="moon", MODEL_NAME="bigscience/bloom-3b", SBATCH_MEM_PER_NODE=enough)
        assert done.stderr == ""
    done, submitted = submit("baseline", SITE="moon", GPU_MEMORY="32GB")
    assert done.returncode == 2
    assert re.fullmatch(r"error: GPU_MEMORY: '32GB' is no number of GiB; .*\n", done.stderr)


def test_a_dry_run_shows_the_knobs_that_were_given(submit):
    done, _ = submit("--dry-run", "baseline", SITE="laptop", MODEL_NAME="my model", TRAIN_SIZE=8)
    assert "MODEL_NAME=my\\ model TRAIN_SIZE=8 SITE=laptop sbatch --parsable baseline.slurm" in done.stdout


def test_help_shows_the_commands(submit):
    done, submitted = submit("--help")
    assert (done.returncode, submitted) == (0, [])
    assert "experiments/submit.sh --chain deepspeed-multi-gpu" in done.stdout
    assert not done.stdout.startswith("#")
