"""The experiments as jobs on the test cluster: submitted from a copy of the repository, then examined.

The copy lies under a path with a space and a quote, so that no test writes into the checkout and every test
shows that such paths work.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cached_property
from pathlib import Path

from cluster import FINAL, Cluster
from cluster import run as run_command
from helpers import REPOSITORY, RUN_TIMEOUT
from reporting.memory_logs import read_cpu_log, read_gpu_log

TIMEOUT = RUN_TIMEOUT  # a job may wait for DeepSpeed's compiler, too
SYSTEM = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@example.org")
# One epoch of two steps, for what needs no more
SHORT = {"TRAIN_SIZE": 32, "EVAL_SIZE": 16, "NUM_EPOCHS": 1, "EM_F1": False, "SAVE_STRATEGY": "no"}
# Weeks of training, for what ends it
ENDLESS = SHORT | {"NUM_EPOCHS": 1_000_000}


def copy_repository(folder: Path) -> Path:
    """The files of the working tree that git knows or would add, as a repository of its own with one commit."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(listed, cwd=REPOSITORY, check=True, capture_output=True, text=True).stdout
    for name in filter(None, names.split("\0")):
        if (REPOSITORY / name).is_file():
            (folder / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(REPOSITORY / name, folder / name)
    for command in (["init", "-q"], ["add", "-A"], ["commit", "-qm", "copy"]):
        subprocess.run([*GIT, *command], cwd=folder, check=True)
    return folder


class Lab:
    """A copy of the repository, and the cluster that its experiments are submitted to."""

    def __init__(self, folder: Path, cluster: Cluster):
        self.root, self.cluster, self.cache = copy_repository(folder / "it's a lab"), cluster, folder / "hf"

    def script(self, experiment: str) -> Path:
        (script,) = (self.root / "experiments" / experiment).glob("*.slurm")
        return script

    @property
    def path(self) -> str:
        """PATH of the jobs: the stand-in for nvidia-smi, this Python, the system."""
        return ":".join([f"{self.root}/tests/slurm/bin", str(Path(sys.executable).parent), *SYSTEM])

    def environment(self, **variables: object) -> dict[str, str]:
        """Nothing of the caller's but the basics; None removes a variable."""
        basics = {
            name: os.environ[name]
            for name in ("HOME", "XDG_CACHE_HOME", "LANG", "LD_LIBRARY_PATH")
            if name in os.environ
        }
        # One thread per rank: the nodes claim more CPUs than this machine has
        ours = {"PATH": self.path, "HF_HOME": self.cache, "SITE": "laptop", "OMP_NUM_THREADS": 1}
        ours["SLURM_CONF"] = self.cluster.env["SLURM_CONF"]
        return {name: str(value) for name, value in (basics | ours | variables).items() if value is not None}

    def submit(self, experiment: str, *arguments: object, sbatch: tuple = (), **variables: object) -> "Job":
        """Run ``sbatch [sbatch] X.slurm [arguments]`` in the experiment's folder."""
        script = self.script(experiment)
        command = ["sbatch", "--parsable", *map(str, sbatch), script.name, *map(str, arguments)]
        done = run_command(command, cwd=script.parent, env=self.environment(**variables))
        return Job(self, script, done.stdout.strip(), shown(variables, command))

    def bash(self, experiment: str, *arguments: object, **variables: object) -> "Local":
        """Start ``bash X.slurm [arguments]`` in the experiment's folder, without Slurm."""
        return Local(self, self.script(experiment), list(map(str, arguments)), variables)

    def submit_sh(self, *arguments: object, **variables: object) -> subprocess.CompletedProcess:
        """Run ``experiments/submit.sh arguments`` in the copy."""
        command = [f"{self.root}/experiments/submit.sh", *map(str, arguments)]
        environment = self.environment(**variables)
        return subprocess.run(command, cwd=self.root, env=environment, capture_output=True, text=True, timeout=120)


def shown(variables: dict, command: list[str]) -> str:
    return " ".join([*(f"{name}={value}" for name, value in variables.items()), *command])


class Run:
    """An experiment that was started, and what it leaves in its folder."""

    def __init__(self, lab: Lab, script: Path, command: str):
        self.lab, self.script, self.folder, self.command = lab, script, script.parent, command
        self.exit_code: int | None = None

    id: str
    log: str

    @property
    def record_path(self) -> Path:
        return self.folder / "results" / f"{self.id}.json"

    @property
    def record(self) -> dict:
        assert self.record_path.exists(), f"no run record\n{self}"
        return json.loads(self.record_path.read_text(encoding="utf-8"))

    @property
    def losses(self) -> list[float]:
        """Evaluation loss of each epoch."""
        return [entry["loss"] for entry in self.record["eval"]]

    def effective(self, knob: str) -> object:
        return self.record["knobs"][knob]["effective"]

    @property
    def error_lines(self) -> list[str]:
        return [line for line in self.log.splitlines() if line.startswith("error: ")]

    @property
    def summary(self) -> list[str]:
        """The lines that job.sh prints at the end."""
        blocks = re.findall(r"^=+\n(status: .*?)^=+$", self.log, re.MULTILINE | re.DOTALL)
        assert len(blocks) == 1, f"one summary expected\n{self}"
        return blocks[0].splitlines()

    def files(self, whose: str = "") -> set[str]:
        """Paths, from the folder, of the files that bear this run's id, or one that matches `whose`."""
        number = whose or re.escape(self.id)
        memory = rf"(?P<kind>[cg]pu)_memory/(?P=kind)_memory_log_{number}([_.].*)"
        own = re.compile(rf"log/.*_{number}\.out|{memory}|results/\.?{number}([/.].*)|output/{number}/.*", re.DOTALL)
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return {path for path in paths if own.fullmatch(path)}

    def memory_logs(self, kind: str) -> dict[str, Path]:
        """This run's ``gpu`` or ``cpu`` memory logs: host (of a job with one node, "") -> path."""
        start = f"{kind}_memory/{kind}_memory_log_{self.id}"
        paths = [path for path in self.files() if path.startswith(f"{kind}_memory/")]
        assert all(path.startswith(start) for path in paths), paths
        return {path[len(start) :].rpartition(".")[0].removeprefix("_"): self.folder / path for path in paths}

    def shell(self, line: str) -> str:
        """Output of a line as a participant types it in the folder."""
        command = ["bash", "-euo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def wait_for(self, condition: Callable[[], object], timeout: float = TIMEOUT) -> object:
        """Poll until `condition` is true, and return its value; fail when the run ends before."""
        deadline = time.monotonic() + timeout
        while time.monotonic() < deadline:
            ended = self.ended
            if value := condition():
                return value
            assert not ended, f"ended too early\n{self}"
            time.sleep(0.5)
        raise AssertionError(f"did not happen within {timeout} s\n{self}")

    def wait_for_training(self) -> None:
        self.wait_for(lambda: "'eval_loss'" in self.log)

    def __str__(self) -> str:
        tail = "\n".join(self.log.splitlines()[-40:])
        return f"command: {self.command}\nin: {self.folder}\nend of the log:\n{tail}"


class Job(Run):
    """A submitted job. `state` and `exit_code` are known after wait()."""

    def __init__(self, lab: Lab, script: Path, job_id: str, command: str):
        super().__init__(lab, script, command)
        self.id, self.state = job_id, ""
        self.twin: Job | None = None  # of the same experiment, at the same time
        self.gpus: dict[str, list[str]] = {}  # node -> indices of the GPUs that Slurm gave it there

    def wait(self, timeout: float = TIMEOUT) -> "Job":
        try:
            self.wait_for_gpus(timeout)
            ended = self.lab.cluster.wait(self.id, timeout)
        except TimeoutError as error:
            self.cancel()
            raise AssertionError(f"{error}\n{self}") from None
        self.state, self.exit_code = ended["state"], ended["exit_code"]
        return self

    def wait_for_gpus(self, timeout: float = TIMEOUT) -> None:
        """Note the job's GPUs once it has started; Slurm forgets them when it ends."""
        self.wait_for(lambda: self.gpus or self._note_gpus() or self.ended, timeout)

    def _note_gpus(self) -> dict[str, list[str]]:
        details = run_command(["scontrol", "show", "job", "--details", self.id], env=self.lab.cluster.env).stdout
        for nodes, ranges in re.findall(r"^ +Nodes=(\S+) .*GRES=gpu:\d+\(IDX:(\S+)\)", details, re.MULTILINE):
            ends = [text.split("-") for text in ranges.split(",")]
            indices = [str(index) for pair in ends for index in range(int(pair[0]), int(pair[-1]) + 1)]
            names = run_command(["scontrol", "show", "hostnames", nodes], env=self.lab.cluster.env).stdout.split()
            self.gpus |= dict.fromkeys(names, indices)
        return self.gpus

    def cancel(self) -> None:
        self.lab.cluster.cancel(self.id)

    def release(self) -> None:
        """Let a job start that was submitted with --hold."""
        run_command(["scontrol", "release", self.id], env=self.lab.cluster.env)

    @property
    def scontrol(self) -> dict[str, str]:
        """What ``scontrol show job`` says."""
        text = run_command(["scontrol", "show", "job", self.id], env=self.lab.cluster.env).stdout
        fields = re.findall(r"^ +(StdOut|Command|WorkDir)=(.*)$", text, re.MULTILINE)
        return dict(re.findall(r"(\w+)=(\S+)", text)) | dict(fields)  # those may hold spaces

    @property
    def ended(self) -> bool:
        return self.scontrol["JobState"] in FINAL

    @cached_property
    def log_path(self) -> Path:
        return Path(self.scontrol["StdOut"])

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace") if self.log_path.exists() else ""

    def processes(self) -> dict[str, list[str]]:
        """Command lines of the job's processes, per node that has some."""
        cluster = self.lab.cluster
        nodes = [f"node{number + 1}" for number in range(cluster.shape["nodes"])]
        return {node: found for node in nodes if (found := cluster.processes(node, f"SLURM_JOB_ID={self.id}\0"))}

    def kill(self, node: str, sent: int, *contains: str) -> int:
        """Send a signal to those of the job's processes on a node that mention all these strings."""
        return self.lab.cluster.kill(node, sent, f"SLURM_JOB_ID={self.id}\0", *contains)


class Local(Run):
    """An experiment that runs without Slurm, in a process group of its own, as a shell starts it."""

    def __init__(self, lab: Lab, script: Path, arguments: list[str], variables: dict):
        command = ["bash", script.name, *arguments]
        super().__init__(lab, script, shown(variables, command))
        self.log_path = script.parent / f"{time.monotonic_ns()}.log"
        self.mark = f"LAB_RUN={self.log_path.stem}"  # in the environment of all its processes
        environment = lab.environment(SLURM_CONF=None, LAB_RUN=self.log_path.stem, **variables)
        with self.log_path.open("wb") as log:
            streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
            # as a terminal starts it; a background job of a shell has Ctrl-C ignored, and so have all that it starts
            streams["preexec_fn"] = lambda: signal.signal(signal.SIGINT, signal.SIG_DFL)
            self.popen = subprocess.Popen(command, cwd=self.folder, env=environment, start_new_session=True, **streams)

    @property
    def id(self) -> str:
        found = re.search(r"^job (\S+) of", self.log, re.MULTILINE)
        assert found, f"no start-up line\n{self}"
        return found[1]

    @property
    def log(self) -> str:
        return self.log_path.read_text(encoding="utf-8", errors="replace")

    @property
    def ended(self) -> bool:
        return self.popen.poll() is not None

    def wait(self, timeout: float = TIMEOUT) -> "Local":
        try:
            self.exit_code = self.popen.wait(timeout)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"still running after {timeout} s\n{self}") from None
        return self

    def processes(self) -> list[str]:
        """Command lines of its processes, also of those that it left."""
        return [command for _, command in self._processes()]

    def _processes(self) -> Iterator[tuple[int, str]]:
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):  # it has ended meanwhile
                if f"{self.mark}\0".encode() in (process / "environ").read_bytes():
                    yield int(process.name), (process / "cmdline").read_bytes().decode().replace("\0", " ")

    def kill(self) -> None:
        for pid, _ in self._processes():
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.popen.wait()


def directives(script: Path) -> dict[str, str]:
    """The ``#SBATCH --name=value`` lines of a script."""
    return dict(re.findall(r"^#SBATCH --([\w-]+)=(\S+)", script.read_text(encoding="utf-8"), re.MULTILINE))


def check_completed(job: Job, nodes: int, gpus: int) -> None:
    """The job has ended well, and left all that an experiment leaves. gpus: per node."""
    assert (job.state, job.exit_code) == ("COMPLETED", 0), str(job)
    record = job.record
    assert (record["status"], record["exit_code"], record["job_id"]) == ("completed", 0, job.id)
    assert record["experiment"] == str(job.folder.relative_to(job.lab.root))
    assert record["world_size"] == nodes * gpus
    assert len(set(record["nodes"])) == nodes
    assert job.losses, str(job)
    assert all(0 < loss < 20 for loss in job.losses), job.losses
    assert sorted(job.gpus) == sorted(set(record["nodes"])), job.gpus
    assert all(len(indices) == gpus for indices in job.gpus.values()), job.gpus
    check_memory_logs(job)
    check_log(job, record["nodes"], gpus)
    assert job.processes() == {}
    assert not (job.folder / "results" / f".{job.id}").exists()


def check_memory_logs(job: Job) -> None:
    """Both logs of every node: the documents' one-liners give the numbers that memory_logs.py reads."""
    expected = job.gpus if len(job.gpus) > 1 else dict(zip([""], job.gpus.values(), strict=True))
    gpu_logs, cpu_logs = job.memory_logs("gpu"), job.memory_logs("cpu")
    assert set(gpu_logs) == set(cpu_logs) == set(expected), str(job)
    for host, path in gpu_logs.items():
        log = read_gpu_log(path)
        assert not log.problems, log.problems
        assert log.names() == expected[host], "the GPUs of the job and no others"
        name = path.relative_to(job.folder)
        peak = job.shell(f"tail -n +2 {name} | cut -d',' -f4 | sort -n | tail -1")
        assert float(peak) == max(map(log.peak, log.samples)) > 0
        for index in log.samples:
            chosen = f"awk -F', ' '$2 == {index} {{print $4}}' {name}"
            assert float(job.shell(f"{chosen} | sort -n | tail -1")) == log.peak(index)
            mean = job.shell(f"{chosen} | awk '{{sum+=$1}} END {{print sum/NR}}'")
            assert abs(float(mean) - log.mean(index)) <= 1e-3 * log.mean(index)
    for path in cpu_logs.values():
        log = read_cpu_log(path)
        assert not log.problems, log.problems
        name = path.relative_to(job.folder)
        peak = job.shell(f"grep -v '^#' {name} | awk '{{print $3}}' | sort -n | tail -1")
        assert float(peak) == log.peak("process")
        assert log.peak("process") > 100, "Python with PyTorch alone takes more"


def check_log(job: Job, hosts: list[str], gpus: int) -> None:
    """Start-up, audit, DeepSpeed's banner, the Trainer's lines, the summary: each where and as often as it should."""
    nodes, log = len(hosts), job.log
    start = f"job {job.id} of {job.folder.relative_to(job.lab.root)}: site laptop, {nodes} node(s) x {gpus} rank(s)"
    assert start in log.splitlines()[0]
    assert f"nodes: {' '.join(hosts)}" in log.splitlines()
    assert len(re.findall(r"^knob +requested +effective$", log, re.MULTILINE)) == 1, str(job)
    banners = len(re.findall(r"^DeepSpeed ZeRO-\d Initialization Complete$", log, re.MULTILINE))
    assert banners == ("--deepspeed" in job.script.read_text()), str(job)
    assert log.count("{'train_runtime'") == 1
    assert len(re.findall(r"\{'eval_loss': '[0-9.]+'", log)) == len(job.losses)
    where = {host: f" on {host}" if nodes > 1 else "" for host in sorted(hosts)}
    titles = [f"GPU {index} memory{where[host]}" for host in where for index in job.gpus[host]]
    titles += [f"CPU memory{place}" for place in where.values()]
    assert job.summary[0] == "status: completed (exit code 0)"
    # what torch.compile needs is in the memory logs, and that is said
    compiles = ["missing"] if "TORCH_COMPILE" in job.script.read_text() else []
    assert [line.split(":")[0] for line in job.summary[1:]] == [*titles, "samples per second", *compiles], job.summary
    for title, line in zip(titles, job.summary[1:], strict=False):
        index, host = re.fullmatch(r"(?:GPU (\d+)|CPU) memory(?: on (.*))?", title).groups()
        path = job.memory_logs("gpu" if index else "cpu")[host or ""]
        memory = read_gpu_log(path) if index else read_cpu_log(path)
        series = index or "process"
        expected = f"peak {memory.peak(series):.0f} MiB, mean {memory.mean(series):.0f} MiB"
        assert line == f"{title}: {expected} ({len(memory.samples[series])} samples)"
    rate = f"samples per second: {job.record['train']['samples_per_second']:.2f} (Trainer)"
    assert job.summary[1 + len(titles)].startswith(rate)
