"""Submit experiments from a copy of the repository to the test cluster, and check their jobs.

No test writes into the checkout. The copy's path has a space and a quote, so every test also tests such paths.
"""

import re
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from functools import cached_property
from pathlib import Path

from breakable_cluster import FINAL, BreakableCluster
from cluster import run as run_command
from helpers import NOTHING_COMPILED, REPOSITORY, RUN_TIMEOUT, RunFiles, inherited, until
from job.memory_logs import read_cpu_log, read_gpu_log

SYSTEM = ("/usr/sbin", "/usr/bin", "/sbin", "/bin")
GIT = ("git", "-c", "user.name=test", "-c", "user.email=test@example.org")
# A training run of 144 steps with a checkpoint after every 12 steps. It takes some 6 seconds on an idle machine.
LONG = {"FP16": False, "TRAIN_SIZE": 96, "EVAL_SIZE": 16, "NUM_EPOCHS": 12, "EM_F1": False, "GRAD_ACC": 1}
LONG |= {"SAVE_STRATEGY": "epoch", "LEARNING_RATE": 5e-4}
STEPS_PER_EPOCH = 12
TWO_NODES = LONG | {"BATCH_SIZE": 4, "MIN_BANDWIDTH": 0, "JOIN_TIMEOUT": 120}
# Experiment, flags and knobs. The first two training runs use the same batches.
TRAININGS = {
    "plain": ("baseline", ("--per_device_eval_batch_size", 8), LONG | {"BATCH_SIZE": 8}),
    "zero-2": (
        "deepspeed-multi-node/2_nodes",
        ("--per_device_eval_batch_size", 4),
        TWO_NODES | {"SAMPLES_PER_GPU": 48},
    ),
    # Steps of FSDP2 take three times as long
    "fsdp2": ("fsdp-multi-node/2_nodes", ("--logging_steps", 1), TWO_NODES | {"NUM_EPOCHS": 6}),
    "fsdp2-lora": ("fsdp-multi-node/2_nodes", (), TWO_NODES | {"NUM_EPOCHS": 6, "LORA_RANK": 4}),
}
# A training run that would take weeks, for tests that end it early
ENDLESS = {"TRAIN_SIZE": 32, "EVAL_SIZE": 16, "NUM_EPOCHS": 1_000_000, "SAVE_STRATEGY": "no"}


def copy_repository(folder: Path) -> Path:
    """Copy the files that git tracks or would add into a new repository with one commit."""
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

    def __init__(self, folder: Path, cluster: BreakableCluster):
        self.root, self.cluster, self.cache = copy_repository(folder / "it's a lab"), cluster, folder / "hf"

    def script(self, experiment: str) -> Path:
        (script,) = (self.root / "experiments" / experiment).glob("*.slurm")
        return script

    @property
    def path(self) -> str:
        """PATH of the jobs: the stub for nvidia-smi, this Python, and the system."""
        return ":".join([f"{self.root}/tests/slurm/bin", str(Path(sys.executable).parent), *SYSTEM])

    def container(self, experiment: str) -> dict[str, str]:
        """CONTAINER of a job: Charliecloud's ch-run, in an image with this machine's folders. Empty without ch-run.

        By default, ch-run starts a program in /.
        """
        image = Path(tempfile.mkdtemp(prefix="image-", dir=self.cache.parent))
        words = ["ch-run", "--no-passwd", f"--cd={self.script(experiment).parent}"]
        for path in Path("/").iterdir():
            if path.is_symlink():
                (image / path.name).symlink_to(path.readlink())
            elif path.is_dir():
                (image / path.name).mkdir()
                words += [f"--bind={path}"] * (path.name not in ("dev", "proc", "sys", "tmp"))
        return {"CONTAINER": shlex.join([*words, str(image), "--"]), "USER": "root"} if shutil.which("ch-run") else {}

    def environment(self, **variables: object) -> dict[str, str]:
        """Variables of a job, with only the caller's basic variables. None removes a variable."""
        # One thread per rank, because the nodes are configured with more CPUs than this machine has
        ours = {"PATH": self.path, "HF_HOME": self.cache, "SITE": "laptop", "OMP_NUM_THREADS": 1}
        ours["SLURM_CONF"] = self.cluster.env["SLURM_CONF"]
        values = inherited() | NOTHING_COMPILED | ours | variables
        return {name: str(value) for name, value in values.items() if value is not None}

    def submit(self, experiment: str, *arguments: object, sbatch: tuple = (), **variables: object) -> "Job":
        """Run ``sbatch [sbatch] X.slurm [arguments]`` in the experiment's folder."""
        script = self.script(experiment)
        command = ["sbatch", "--parsable", *map(str, sbatch), script.name, *map(str, arguments)]
        done = run_command(command, cwd=script.parent, env=self.environment(**variables))
        shown = [*(f"{name}={value}" for name, value in variables.items()), *command]
        return Job(self, script, done.stdout.strip(), " ".join(shown))

    def submit_sh(self, *arguments: object, **variables: object) -> list["Job"]:
        """Run ``experiments/submit.sh arguments``."""
        command = [f"{self.root}/experiments/submit.sh", *map(str, arguments)]
        done = run_command(command, cwd=self.root, env=self.environment(**variables))
        lines = [line.split("  ") for line in done.stdout.splitlines()]
        return [Job(self, self.root / script, number, " ".join(command)) for number, script in lines]

    def unfinished(self) -> list[str]:
        """Id and folder of the jobs that were submitted from this copy and have not ended."""
        lines = run_command(["squeue", "--noheader", "--format=%i %Z"], env=self.cluster.env).stdout.splitlines()
        return [line for line in lines if f" {self.root}/" in line]


class Job(RunFiles):
    """A submitted job and the files in its folder. `state` and `code` are known after wait()."""

    def __init__(self, lab: Lab, script: Path, job_id: str, command: str):
        self.lab, self.script, self.folder, self.command = lab, script, script.parent, command
        self.job_id, self.state, self.code = job_id, "", None
        self.gpus: dict[str, list[str]] = {}  # node -> indices of the job's GPUs on the node

    @property
    def summary(self) -> list[str]:
        """The lines that job.sh prints at the end."""
        blocks = re.findall(r"^=+\n(status: .*?)^=+$", self.log, re.MULTILINE | re.DOTALL)
        assert len(blocks) == 1, f"expected one summary\n{self}"
        return blocks[0].splitlines()

    def files(self) -> set[str]:
        """Paths, relative to the folder, of the files with this job's id in their names."""
        number = re.escape(self.job_id)
        memory = rf"(?P<kind>[cg]pu)_memory/(?P=kind)_memory_log_{number}([_.].*)"
        own = re.compile(
            rf"log/.*_{number}\.out|{memory}|results/(jobs/)?\.?{number}([/.].*)|output/{number}/.*", re.DOTALL
        )
        paths = (str(path.relative_to(self.folder)) for path in self.folder.rglob("*") if path.is_file())
        return {path for path in paths if own.fullmatch(path)}

    def memory_logs(self, kind: str) -> dict[str, Path]:
        """This job's ``gpu`` or ``cpu`` memory logs by host ("" for a job with one node)."""
        start = f"{kind}_memory/{kind}_memory_log_{self.job_id}"
        paths = [path for path in self.files() if path.startswith(f"{kind}_memory/")]
        assert all(path.startswith(start) for path in paths), paths
        return {path[len(start) :].rpartition(".")[0].removeprefix("_"): self.folder / path for path in paths}

    def shell(self, line: str) -> str:
        """Output of a shell command that a participant types in the folder."""
        command = ["bash", "-euo", "pipefail", "-c", line]
        return subprocess.run(command, cwd=self.folder, check=True, capture_output=True, text=True).stdout.strip()

    def until(self, condition: Callable[[], object], timeout: float = RUN_TIMEOUT) -> object:
        """Poll until `condition` is true, and return its value. Fail if the job ends earlier."""
        return until(condition, timeout, lambda: self.ended, self, pause=0.5)

    def wait_for_training(self) -> None:
        self.until(lambda: "'eval_loss'" in self.log)

    def wait(self, timeout: float = RUN_TIMEOUT) -> "Job":
        try:
            self.wait_for_gpus(timeout)
            self.state, self.code = self.lab.cluster.wait(self.job_id, timeout)
        except TimeoutError as error:
            self.cancel()
            raise AssertionError(f"{error}\n{self}") from None
        return self

    def wait_for_gpus(self, timeout: float = RUN_TIMEOUT) -> None:
        """Store the job's GPUs after its start, because Slurm forgets them at its end."""
        self.until(lambda: self.gpus or self._store_gpus() or self.ended, timeout)

    def _store_gpus(self) -> dict[str, list[str]]:
        details = run_command(["scontrol", "show", "job", "--details", self.job_id], env=self.lab.cluster.env).stdout
        for nodes, ranges in re.findall(r"^ +Nodes=(\S+) .*GRES=gpu:\d+\(IDX:(\S+)\)", details, re.MULTILINE):
            ends = [text.split("-") for text in ranges.split(",")]
            indices = [str(index) for pair in ends for index in range(int(pair[0]), int(pair[-1]) + 1)]
            names = run_command(["scontrol", "show", "hostnames", nodes], env=self.lab.cluster.env).stdout.split()
            self.gpus |= dict.fromkeys(names, indices)
        return self.gpus

    def cancel(self) -> None:
        run_command(["scancel", self.job_id], env=self.lab.cluster.env)

    @property
    def scontrol(self) -> dict[str, str]:
        """Fields of ``scontrol show job``."""
        text = run_command(["scontrol", "show", "job", self.job_id], env=self.lab.cluster.env).stdout
        fields = re.findall(r"^ +(StdOut|Command|WorkDir)=(.*)$", text, re.MULTILINE)
        return dict(re.findall(r"(\w+)=(\S+)", text)) | dict(fields)  # the values of `fields` may hold spaces

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
        """Map each node on which the job has processes to their command lines."""
        cluster = self.lab.cluster
        found = {node: cluster.processes(node, f"SLURM_JOB_ID={self.job_id}\0") for node in cluster.nodes}
        return {node: list(commands.values()) for node, commands in found.items() if commands}

    def kill(self, node: str, sent: int, *contains: str) -> int:
        """Send a signal to the job's processes on a node that match all these strings."""
        return self.lab.cluster.kill(node, sent, f"SLURM_JOB_ID={self.job_id}\0", *contains)


def check_completed(job: Job, nodes: int, gpus: int) -> None:
    """Check that the job has succeeded and has left all files of an experiment. gpus: number per node."""
    assert (job.state, job.code) == ("COMPLETED", 0), str(job)
    record = job.record
    assert (record["status"], record["exit_code"], record["job_id"]) == ("completed", 0, job.job_id)
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
    assert not (job.folder / "results" / f".{job.job_id}").exists()


def check_memory_logs(job: Job) -> None:
    """Check that every node has a log of the job's GPUs and a log of the training's processes."""
    expected = job.gpus if len(job.gpus) > 1 else dict(zip([""], job.gpus.values(), strict=True))
    gpu_logs, cpu_logs = job.memory_logs("gpu"), job.memory_logs("cpu")
    assert set(gpu_logs) == set(cpu_logs) == set(expected), str(job)
    for host, path in gpu_logs.items():
        log = read_gpu_log(path)
        assert not log.problems, log.problems
        assert log.names() == expected[host], "the log must hold the job's GPUs and no others"
        assert all(len(log.power_curve(name)) == len(log.samples[name]) for name in log.names())
    for path in cpu_logs.values():
        log = read_cpu_log(path)
        assert not log.problems, log.problems
        assert log.peak("process") > 100, "an import of PyTorch already takes more"


def check_log(job: Job, hosts: list[str], gpus: int) -> None:
    """Check the number of start-up, audit, banner and Trainer lines in the log, and the summary at its end."""
    nodes, log = len(hosts), job.log
    start = f"job {job.job_id} of {job.record['experiment']}: site laptop, {nodes} node(s) x {gpus} rank(s)"
    assert start in log.splitlines()[0]
    assert f"nodes: {' '.join(hosts)}" in log.splitlines()
    assert len(re.findall(r"^knob +requested +effective$", log, re.MULTILINE)) == 1, str(job)
    banners = len(re.findall(r"^DeepSpeed ZeRO-\d Initialization Complete$", log, re.MULTILINE))
    command = job.script.read_text().rstrip().splitlines()[-1]
    assert banners == ("--deepspeed" in command), str(job)
    assert log.count("{'train_runtime'") == 1
    assert len(re.findall(r"\{'eval_loss': '[0-9.]+'", log)) == len(job.losses)
    where = {host: f" on {host}" if nodes > 1 else "" for host in sorted(hosts)}
    gpu_rows = [(what, gpu, host) for host in where for what in ("memory", "power") for gpu in job.gpus[host]]
    titles = [f"GPU {gpu} {what}{where[host]}" for what, gpu, host in gpu_rows]
    titles += [f"CPU memory{place}" for place in where.values()]
    assert job.summary[0] == "status: completed (exit code 0)"
    # With torch.compile, the summary says that the memory logs include the compiler
    compiles = ["missing"] if job.record["settings"].get("torch_compile") else []
    assert [line.split(":")[0] for line in job.summary[1:]] == [*titles, "samples per second", *compiles], job.summary
    rate = f"samples per second: {job.record['train']['samples_per_second']:.2f} (Trainer)"
    assert job.summary[1 + len(titles)].startswith(rate)
