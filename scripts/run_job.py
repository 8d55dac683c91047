"""Run a job of an experiment, from its preparation to its summary. job.sh starts this program in the job's environment.

    DRY_RUN=1 bash X.slurm                               # shows what this program would start
    python scripts/run_job.py torchrun scripts/train.py  # or python, or srun, as job.sh does it

job.sh passes on the signals that Slurm sends to its shell, and this program passes them on to the training, all but
USR1 as TERM. It ends with the exit code of the rank that failed first. If no rank failed, it ends with that of the run
record.

The programs that train or measure run in the site's CONTAINER, if it has one. This program, srun, on_node.py and the
memory loggers stay outside. They need the packages of requirements-host.txt only.
"""

import contextlib
import fcntl
import math
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import traceback
from pathlib import Path

from distributed.rendezvous import free_port, node_name
from job import on_node
from job.directives import gpus_per_node, parse_count, read_directives
from job.end_of_job import End, ask_slurm, begin_attempt, end_attempt, note_attempt, sweep
from records.git_state import git_status
from records.schema import Attempt, Record, check_job_id, read_record
from shared.errors import ENVIRONMENT, STOPPED, WorkshopError, report, run_program, survive_lost_output, whole_number
from shared.paths import CHECKPOINT_MARKER, REPOSITORY

SCRIPTS = REPOSITORY / "scripts"
BANDWIDTH_TEST = str(SCRIPTS / "measure_bandwidth.py")


def main() -> None:
    if "--help" in sys.argv[1:2]:
        sys.exit(print(__doc__))
    kind, *words = sys.argv[1:]
    survive_lost_output()
    job = Job(kind)
    if job.restarts and is_completed(job, words):
        sys.exit(print(f"{job.record}: completed before Slurm started this job again, so nothing is left to do"))
    command = on_node.Command(os.environ["NOTED_SIGNALS"].split(), lambda: note_signal(job))
    on_node.end_with_parent()
    # job.sh has started this process with ignored signals, and now sends those that came in the meantime
    os.kill(int(os.environ["JOB_SHELL"]), signal.SIGURG)
    if job.dry_run and job.slurm_id:
        print("warning: DRY_RUN has no effect in a Slurm job", file=sys.stderr)
        job.dry_run = False
    check(job, words)
    set_variables(job)
    if job.dry_run:
        sys.exit(show(job, words))
    begin(job)
    if command.signals:  # they came before the attempt began
        note_signal(job)
    try:
        prepare(job)
        code = check_bandwidth(job, command) if os.environ["CHECK_BANDWIDTH"] == "yes" else 0
        code = code or start(job, command, job.kind, words)
    except WorkshopError as error:
        report(error)
        code = error.code
    except Exception:  # a mistake here must not leave a job without its end
        traceback.print_exc()
        code = 1
    on_node.end_program(finish(job, command.signals, code))


class Job:
    """A job from the variables of Slurm and job.sh, and from the directives of its .slurm file.

    kind: python, torchrun or srun. nodes: those that the training uses. gpus, ranks: numbers per node. attempt,
    run_dir: the current start of this job, and the folder in which its parts exchange files; both are set when the
    attempt begins. notes: what makes it slower than its allocation allows.
    """

    attempt: Attempt
    run_dir: Path
    notes: tuple[str, ...] = ()

    def __init__(self, kind: str):
        self.id = os.environ["JOB_ID"]
        self.slurm_id = os.environ.get("SLURM_JOB_ID")
        self.restarts = int(os.environ.get("SLURM_RESTART_COUNT", "0"))
        self.script = Path(os.environ["JOB_SCRIPT"])
        self.asked = read_directives(self.script) if self.script.is_file() else {}
        self.dry_run = os.environ.get("DRY_RUN", "0") not in ("", "0")  # true also means 1
        self.kind = kind
        # Slurm runs a copy of the script, but bash runs the script itself in a shell of salloc
        self.by_sbatch = self.slurm_id is not None and self.script.suffix != ".slurm"
        self.asked_nodes = parse_count(self.asked.get("nodes", ""))
        self.all_nodes = int(os.environ.get("SLURM_JOB_NUM_NODES") or self.asked_nodes)
        one = kind == "python" or (self.asked_nodes == 1 and not self.by_sbatch)
        self.nodes = 1 if one else self.all_nodes
        self.asked_gpus = gpus_per_node(self.asked)
        self.in_slurm = ask_slurm("scontrol", "show", "job", self.slurm_id) if self.slurm_id else ""
        requested = os.environ.get("SLURM_GPUS_PER_NODE", "0")
        # In a job with whole nodes (--exclusive), GPUs that nobody requested are allocated, too
        whole_nodes = "OverSubscribe=NO" in self.in_slurm
        allocated = requested if whole_nodes else os.environ.get("SLURM_GPUS_ON_NODE") or requested
        self.gpus = parse_count(allocated) or self.asked_gpus
        # If ranks may share a GPU, fewer GPUs than in the script do not change its number of ranks
        self.ranks_per_gpu = max(1, whole_number("RANKS_PER_GPU", "1"))
        self.ranks = max(self.gpus, min(self.asked_gpus, self.gpus * self.ranks_per_gpu))
        self.record = Path("results", f"{self.id}.json")

    def overrides(self) -> list[str]:
        """Return the differences between the allocation and the directives of the .slurm file."""
        numbers = [("gpus-per-node", self.gpus, self.asked_gpus)]
        if self.kind != "python":
            numbers.insert(0, ("nodes", self.nodes, self.asked_nodes))
        return [f"{name}: {number} instead of {asked}" for name, number, asked in numbers if number != asked]

    def __str__(self) -> str:
        size = f"{self.nodes} node(s) x {self.ranks} rank(s)"
        return f"{os.environ['EXPERIMENT']}: site {os.environ['SITE']}, {size}"


# 1. Before the training


def is_completed(job: Job, words: list[str]) -> bool:
    """Return True if an earlier start of this job has completed the training. words: its program and arguments.

    After a node failure, a preemption or `scontrol requeue`, Slurm also starts a job again that had only to end. A
    second program of the script, such as an evaluation, may not have ended, so it runs again.
    """
    record = read_record(job.record) if job.record.exists() else None
    return bool(record and record.status == "completed" and Path(*record.command[:1]).name == Path(words[0]).name)


def check(job: Job, words: list[str]) -> None:
    """Raise WorkshopError for a job that could not work: a wrong folder, node or number of GPUs."""
    check_job_id(job.id)
    script = str(job.script)
    if job.by_sbatch:
        found = re.search(r"^ *Command=(.*)", job.in_slurm, re.MULTILINE)
        script = os.path.join(os.environ.get("SLURM_SUBMIT_DIR", ""), found[1] if found else "")
    folder = os.path.dirname(script.rpartition(".slurm")[0]) or "."
    # A script of another folder would write its results here, under a wrong name
    if ".slurm" in script and not (os.path.isdir(folder) and os.path.samefile(folder, ".")):
        raise WorkshopError(script, f"it does not belong to this folder, {os.getcwd()}", "start it in its own folder")
    container = shlex.split(os.environ.get("CONTAINER", ""))
    if container and not shutil.which(container[0]):
        remedy = "correct it in the site file, or load its module in site_setup"
        raise WorkshopError("CONTAINER", f"there is no program {container[0]}", remedy, ENVIRONMENT)
    if job.slurm_id:
        check_allocation(job, words)
    elif job.dry_run and job.asked_gpus > whole_number("GPUS_PER_NODE", str(job.asked_gpus)) * job.ranks_per_gpu:
        what = f"it needs {job.asked_gpus} GPUs per node, and GPUS_PER_NODE={os.environ['GPUS_PER_NODE']} of the site"
        raise WorkshopError(job.script.name, what, "choose a smaller experiment")
    elif job.all_nodes > 1 and not job.dry_run:
        what = f"it needs {job.all_nodes} nodes, but is not in a Slurm job"
        raise WorkshopError(job.script.name, what, "submit it with sbatch", ENVIRONMENT)


def check_allocation(job: Job, words: list[str]) -> None:
    first = ask_slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).partition("\n")[0]
    if first and first.split(".")[0] != node_name().split(".")[0]:  # many sites open salloc's shell on the login node
        what = f"it must run on {first}, the first node of job {job.slurm_id}, and this shell is on {node_name()}"
        remedy = "open a shell there (srun --overlap --nodes=1 --ntasks=1 --pty bash), or submit it with sbatch"
        raise WorkshopError(job.script.name, what, remedy, ENVIRONMENT)
    total = parse_count(os.environ.get("SLURM_GPUS") or "0")
    if total and job.nodes > 1 and total != job.nodes * job.gpus:
        what = f"{total} GPUs on {job.nodes} nodes, of which this node has {job.gpus}"
        raise WorkshopError("--gpus", what, "give each node the same number, with --gpus-per-node")
    starts_ranks = words[0] == str(SCRIPTS / "gpu_check.py") and "--ranks" in words
    if job.kind == "python" and job.gpus > job.asked_gpus and job.by_sbatch and not starts_ranks:
        what = f"{job.gpus} GPUs, but run_python trains on one"
        raise WorkshopError("sbatch", what, "submit without this flag, or use run_torchrun in the script")


def set_variables(job: Job) -> None:
    """Export what the training and the other nodes need."""
    cpus = min(int(os.environ.get("SLURM_CPUS_ON_NODE") or 1 << 20), len(os.sched_getaffinity(0)))
    cpus_per_rank = max(1, cpus // job.ranks)
    # torchrun would set one thread, which makes an optimizer step on the CPU very slow
    threads = os.environ.get("OMP_NUM_THREADS") or str(cpus_per_rank)
    origins = re.findall(r" OMP_NUM_THREADS=(\w+)", os.environ.get("KNOB_ORIGINS", ""))  # the last one counts
    if origins[-1:] == ["submission"] and threads.isdecimal() and int(threads) < cpus_per_rank:
        job.notes = (
            f"OMP_NUM_THREADS={threads} from the submission: each rank has {cpus_per_rank} CPUs; unset it first",
        )
    os.environ |= {
        "NODES": str(job.nodes),
        "ALLOCATED_NODES": str(job.all_nodes),
        "RANKS_PER_NODE": str(job.ranks),
        "OMP_NUM_THREADS": threads,
        "SLURM_EXPORT_ENV": "ALL",  # sbatch --export=NONE sets NONE, and srun would pass on no variable
    }
    if "SLURM_CPUS_PER_TASK" in os.environ:  # since Slurm 22.05, srun does not inherit this value
        os.environ["SRUN_CPUS_PER_TASK"] = os.environ["SLURM_CPUS_PER_TASK"]


def begin(job: Job) -> None:
    """Create the folders, and note the start of this attempt."""
    try:
        for folder in ("log", "gpu_memory", "cpu_memory", f"results/.{job.id}"):
            Path(folder).mkdir(parents=True, exist_ok=True)
        if not job.slurm_id:
            keep_log(job)
        lock(job)
        nodes = ask_slurm("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
        facts = {"nodes": nodes[: job.nodes] or [node_name()], "overrides": job.overrides(), "notes": job.notes}
        job.attempt = begin_attempt(job.record, job.restarts, **facts)
        # Each attempt has its own folder. So a process of an earlier attempt, on a node that did not answer for a
        # while, cannot change the notes of this one
        job.run_dir = Path.cwd() / "results" / f".{job.id}" / str(job.attempt.attempt)
        shutil.rmtree(job.run_dir, ignore_errors=True)  # a user may have removed the other files of a killed job
        job.run_dir.mkdir()
    except OSError as error:
        remedy = "free disk space, or check its permissions"
        raise WorkshopError(os.getcwd(), "it cannot be written", remedy, ENVIRONMENT) from error
    os.environ |= {
        "RUN_DIR": str(job.run_dir),
        "BANDWIDTH_FILE": str(job.run_dir / "bandwidth.json"),
        "ATTEMPT": str(job.attempt.attempt),
        "ALL_NODES": "\n".join(job.attempt.nodes),
    }


def keep_log(job: Job) -> None:
    """Also write the output into the log, as Slurm does, and continue when the terminal is closed."""
    name = job.asked.get("job-name", job.script.name)
    for stream in (1, 2):
        tee = subprocess.Popen(
            ["tee", "-p", "-a", f"log/{name}_{job.id}.out"],
            stdin=subprocess.PIPE,
            stdout=stream,
            stderr=subprocess.DEVNULL,
            restore_signals=False,
            preexec_fn=lambda: on_node.ignore(*on_node.SIGNALS, signal.SIGPIPE),  # it also writes the log's last lines
        )
        assert tee.stdin
        os.dup2(tee.stdin.fileno(), stream)
        tee.stdin.close()


def lock(job: Job) -> None:
    """Refuse a second script with the same id, for example in the same salloc. The lock ends with this process."""
    if job.restarts:
        return  # a file server may still hold the lock of a failed node
    try:
        fcntl.flock(os.open(f"results/.{job.id}", os.O_RDONLY), fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        what = f"another run of {job.id} is writing its files"
        raise WorkshopError("JOB_ID", what, "give another JOB_ID, or wait until that run ends") from None
    except OSError:
        pass  # a file system without locks


def prepare(job: Job) -> None:
    """Note the ends of other jobs that are gone, choose the rendezvous, and print the first lines of the log."""
    sweep(Path("results"), own=job.id)
    # The ranks meet at the address of this node on the route to the second node
    address = os.environ.get("MASTER_ADDR") or (address_towards(job.attempt.nodes[1]) if job.nodes > 1 else "127.0.0.1")
    os.environ |= {"MASTER_ADDR": address, "MASTER_PORT": str(free_port(f"{job.id}.{job.attempt.attempt}"))}
    # An attempt uses two numbers of Slurm's job steps: one for the bandwidth test, one for the training. Once a
    # minute, Slurm tells a node that was down to end the old steps of this job, and that would also end a new step with
    # the same number. So a restarted job uses up the numbers of its earlier attempts
    for _ in range(2 * (job.attempt.attempt - 1) if job.restarts and job.nodes > 1 else 0):
        subprocess.run(["srun", "--quiet", "--nodes=1", "--ntasks=1", "true"], check=False)
    # Run git here, and not in the training. A large training would fork to start git, and a memory log may count its
    # memory twice during the fork
    with contextlib.suppress(OSError):
        (job.run_dir / "git_status").write_text(git_status(), encoding="utf-8")
    print(f"job {job.id} of {job}, rendezvous {address}:{os.environ['MASTER_PORT']}")
    print("\n".join([f"nodes: {' '.join(job.attempt.nodes)}", *job.notes]))
    if job.nodes < job.all_nodes:
        print(f"run_{job.kind} uses 1 of the {job.all_nodes} nodes of this job")
    if os.environ.get("CUDA_VISIBLE_DEVICES") == "" and shutil.which("nvidia-smi"):
        advice = "to use one, put CUDA_VISIBLE_DEVICES=0 before the command"
        print(f"GPUs are hidden from this job (site {os.environ['SITE']}); {advice}")


def address_towards(node: str) -> str:
    """Return this machine's address on the route to a node. Raises WorkshopError (exit code 3) if there is no route.

    The host name would not work: on many machines it means loopback (Debian writes "127.0.1.1 host" into /etc/hosts),
    and the other nodes would connect to themselves.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(node, 9, type=socket.SOCK_DGRAM)[0]  # any port works
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # this chooses a route without sending anything
            return probe.getsockname()[0]
    except OSError as error:
        what = f"{socket.gethostname()} has no address on the way to {node} ({error})"
        remedy = "set it to the first node's address (ip -brief address shows it there)"
        raise WorkshopError("MASTER_ADDR", what, remedy, ENVIRONMENT) from error


# 2. The bandwidth test and the training


def plan(job: Job, kind: str, words: list[str]) -> tuple[int, list[str]]:
    """Return the number of tasks that srun starts on each node, 0 without srun, and the command of each task."""
    if kind != "torchrun":
        return job.ranks if kind == "srun" else 0, on_node.python_command(*words)
    # Use the static rendezvous: c10d executes code that anybody sends to its store
    flags = [f"--nnodes={job.nodes}", f"--nproc-per-node={job.ranks}", "--rdzv-backend=static", f"--rdzv-id={job.id}"]
    flags += [f"--master-addr={os.environ['MASTER_ADDR']}", f"--master-port={os.environ['MASTER_PORT']}"]
    return 1 if job.nodes > 1 else 0, on_node.python_command(SCRIPTS / "launch.py", *flags, *words)


def start(job: Job, command: on_node.Command, kind: str, words: list[str]) -> int:
    """Start a program on all nodes, and wait for its end. Return its exit code.

    After a signal, start nothing: there would be nothing to save, and Slurm starts no step of a cancelled job.
    """
    if command.signals:
        return 128 + signal.Signals[f"SIG{command.signals[0]}"]
    if kind == "srun" and not job.slurm_id:
        print(f"this is not a Slurm job: torchrun starts the {job.ranks} ranks instead of srun")
        kind = "torchrun"
    tasks, task = plan(job, kind, words)
    if not tasks:
        return on_node.run(command, task)
    sizes = [f"--nodes={job.nodes}", f"--ntasks={job.nodes * tasks}", f"--ntasks-per-node={tasks}"]
    # Without --kill-on-bad-exit, the other ranks would wait forever for a failed rank
    srun = ["srun", *sizes, "--kill-on-bad-exit=1", "--cpu-bind=none"]
    command.start([*srun, sys.executable, "-P", str(SCRIPTS / "job/on_node.py"), *task])
    return command.wait()


def check_bandwidth(job: Job, command: on_node.Command) -> int:
    """Measure the network. srun starts the ranks: torchrun would need seconds to import PyTorch.

    No memory loggers run, because their files belong to the training. The .slurm files for torchrun request one task
    per node, but the test needs one per GPU, so its tasks share the CPUs.
    """
    before = dict(os.environ)
    os.environ |= {"LOGGERS": "no", "SLURM_OVERCOMMIT": "1", "SRUN_CPUS_PER_TASK": "1"}
    code = start(job, command, "srun", [BANDWIDTH_TEST, "--output", os.environ["BANDWIDTH_FILE"]])
    os.environ.clear()
    os.environ |= before
    for left in job.run_dir.glob("joining_*"):  # notes of distributed/rendezvous.py
        left.unlink()
    return code


def show(job: Job, words: list[str]) -> int:
    """Show the commands in a dry run. For a training run, also check its settings and estimate its memory."""
    print(job)
    os.environ |= {"MASTER_ADDR": "FIRST_NODE", "MASTER_PORT": "PORT"}
    steps = [("srun", [BANDWIDTH_TEST])] if os.environ["CHECK_BANDWIDTH"] == "yes" else []
    for kind, program in [*steps, (job.kind, words)]:
        tasks, task = plan(job, kind, program)
        print(shlex.join([*["srun", f"--nodes={job.nodes}", f"--ntasks-per-node={tasks}"][: 3 * bool(tasks)], *task]))
    if words[0] != str(SCRIPTS / "train.py"):
        return 0
    gib = os.environ.get("SBATCH_MEM_PER_NODE") or job.asked.get("mem", "")
    if os.environ["SITE"] == "laptop":
        gib = f"{os.sysconf('SC_PAGE_SIZE') * os.sysconf('SC_PHYS_PAGES') / 2**30:.0f}G"
    available = ["--cpu_memory", gib[:-1]] if gib.endswith("G") else []
    if gpu := os.environ.get("GPU_MEMORY"):
        available += ["--gpu_memory", gpu]
    os.environ["RANKS_PER_GPU"] = str(math.ceil(job.ranks / job.gpus))  # the site's value is only the limit
    sizes = ["--gpus", str(job.nodes * job.ranks), "--nodes", str(job.nodes)]
    estimate = on_node.python_command(SCRIPTS / "estimate_memory.py", "--knobs", *sizes, *available, *words[1:])
    return subprocess.run(estimate).returncode


# 3. The end of the job


def note_signal(job: Job) -> None:
    """Note a signal at once: if the training does not react, Slurm kills it together with this program."""
    if not hasattr(job, "attempt"):
        return  # main notes it when the attempt has begun
    noted = {"status": "stopped", "exit_code": 128 + signal.SIGTERM}
    job.attempt = job.attempt.model_copy(update=noted)
    with contextlib.suppress(WorkshopError, OSError):
        note_attempt(job.record, job.attempt)


def finish(job: Job, signals: list[str], code: int) -> int:
    """Note the end of this attempt, print the summary, upload, and requeue the job if Slurm has warned it.

    Return the exit code of the job.
    """
    # A second signal does not interrupt this function. It may end the upload, which is a process of its own
    on_node.handle_signals(lambda *_: None)
    asked = ask_slurm("scontrol", "show", "job", job.slurm_id) if signals and job.slurm_id else ""
    end = end_attempt(job.record, job.run_dir, job.attempt, code, "Reason=TimeLimit" in asked, job.nodes * job.ranks)
    shutil.rmtree(job.run_dir.parent if end.newest else job.run_dir, ignore_errors=True)
    if end.newest:
        upload(job, stopped=bool(signals))
        if {*signals} == {"USR1"} and os.environ.get("REQUEUE") == "1":
            requeue(job, end)
    return end.code


def upload(job: Job, stopped: bool) -> None:
    """Upload the job's offline runs to Weights & Biases, if the site says that nodes have network access."""
    if os.environ.get("WANDB_ONLINE") != "1" or not Path("wandb", job.id).is_dir():
        return
    words = on_node.python_command(SCRIPTS / "tracking.py", job.id)
    # A stopped job has no time for an upload
    if stopped or subprocess.run(words).returncode:
        print(f"not uploaded to Weights & Biases; to upload later, run in this folder: {shlex.join(words)}")


def requeue(job: Job, end: End) -> None:
    """Let Slurm start a stopped job again under the same id. The training then resumes from its checkpoint."""
    # A code above 128 means that the training was killed before it had saved a checkpoint of its end
    if end.code != STOPPED and end.code <= 128:
        return
    if job.restarts >= int(os.environ["MAX_RESTARTS"]):
        print(f"not requeued: this job was already restarted {job.restarts} times (MAX_RESTARTS)")
    elif end.code != STOPPED and not saved_checkpoint(end.record):
        advice = "give a longer time limit or an earlier warning (SBATCH_SIGNAL), or save earlier (--save_steps)"
        print(f"not requeued: this attempt saved no checkpoint, so the next one would end at the same step; {advice}")
    elif subprocess.run(["scontrol", "requeue", str(job.slurm_id)]).returncode:
        advice = "if your cluster does not requeue jobs by default, submit with SBATCH_REQUEUE=1"
        print(f"not requeued: Slurm refused; {advice}")


def saved_checkpoint(record: Record | None) -> bool:
    """Return True if the training of this attempt has saved a checkpoint after the one that it resumed from."""
    if not record or not record.output_dir:
        return False
    markers = Path(record.output_dir).glob(f"checkpoint-*/{CHECKPOINT_MARKER}")
    saved = [path.parent for path in markers if f'"job_id": "{record.job_id}"' in path.read_text(errors="replace")]
    resumed = Path(record.resumed_from or "checkpoint-0")
    return max(map(checkpoint_step, saved), default=0) > checkpoint_step(resumed)


def checkpoint_step(folder: Path) -> int:
    return int("".join(re.findall(r"checkpoint-(\d+)$", folder.name)) or 0)


if __name__ == "__main__":
    run_program(main)
