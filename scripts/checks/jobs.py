"""Checks of preflight.py that train: one tiny job per launcher on this machine, and three through Slurm."""

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path

from checks.machine import Lines, command, last_line
from knobs import KNOBS
from paths import REPOSITORY, SAMPLE

TINY = {"MODEL_NAME": "tiny-bloom", "TRAIN_SIZE": 8, "EVAL_SIZE": 4, "MAX_LENGTH": 256, "SAMPLES_PER_GPU": 8}
TINY |= {"BATCH_SIZE": 2, "GRAD_ACC": 1, "NUM_EPOCHS": 1, "EM_F1": False, "SAVE_STRATEGY": "no", "REPORT_TO": "none"}
JOBS = ("baseline", "deepspeed-multi-node/2_nodes", "deepspeed-native-launch/zero3_offload")
UNFINISHED = ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING", "SUSPENDED", "REQUEUED", "STAGE_OUT")


def tiny_jobs(folder: Path, timeout: int) -> Lines:
    import torch

    from parallel.distributed import free_port

    train = str(REPOSITORY / "scripts/train.py")
    gpu = torch.cuda.is_available()
    ranks = min(2, torch.cuda.device_count()) if gpu else 2
    launch = [sys.executable, str(REPOSITORY / "scripts/launch.py"), f"--nproc-per-node={ranks}", "--nnodes=1"]
    launch += ["--rdzv-backend=static", "--master-addr=127.0.0.1"]
    jobs = {"plain python": ([sys.executable, train], 1)}
    for name, flags in (("ZeRO-2", ("--deepspeed", "ds_configs/zero2.json")),
                        ("ZeRO-2 offload", ("--deepspeed", "ds_configs/zero2_cpu_offload.json")),
                        ("FSDP full_shard", ("--fsdp", "--fsdp_config", "fsdp_configs/full_shard.json"))):  # fmt: skip
        paths = [str(REPOSITORY / flag) if flag.endswith(".json") else flag for flag in flags]
        jobs[name] = [*launch, f"--master-port={free_port()}", train, *paths], ranks
    if not gpu:
        del jobs["ZeRO-2 offload"]  # its optimizer is on the CPU in any case
    for name, (words, count) in jobs.items():
        start = time.monotonic()
        log = folder / f"{name.replace(' ', '_')}.log"
        variables = tiny_variables(folder, dict(os.environ), gpu)
        variables |= {"JOB_ID": log.stem, "OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // count))}
        done = train_once([*words, "--max_steps", "2"], variables, folder, log, timeout)
        record = folder / "results" / f"{log.stem}.json"
        if done and record.is_file():
            loss = json.loads(record.read_text())["train"]["loss_mean"]
            found = f"2 steps on {count} {'GPU' if gpu else 'CPU'} rank(s), loss {loss:.2f}"
            yield "ok", name, f"{found}, {time.monotonic() - start:.0f} s with its start"
        else:
            yield "fail", name, last_line(log.read_text(errors="replace")), f"read {keep(folder, log)}"


def tiny_variables(folder: Path, variables: dict, gpu: bool) -> dict:
    """`variables` for a training of tiny-bloom: no knob, launcher or job of the caller reaches it."""
    others = {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "JOB_ID"}
    others |= {knob.variable for knob in KNOBS} | {"EXPERIMENT", "BANDWIDTH_FILE", "RUN_DIR", "SNAPSHOT"}
    kept = {k: v for k, v in variables.items() if k not in others and (k[:6] != "SLURM_" or k == "SLURM_CONF")}
    tiny = TINY | {"DATASET": SAMPLE, "HF_DATASETS_CACHE": folder / "datasets"}
    return kept | {k: str(v) for k, v in (tiny if gpu else tiny | {"FP16": False}).items()}


def train_once(words: list[str], variables: dict, folder: Path, log: Path, timeout: int) -> bool:
    """Whether it ended well in time. torchrun gives each rank a session of its own, so all children are ended."""
    import psutil

    with log.open("a") as file:
        process = psutil.Popen(words, cwd=folder, env=variables, stdin=subprocess.DEVNULL, stdout=file, stderr=file)
        try:
            return process.wait(timeout) == 0
        except psutil.TimeoutExpired:
            file.write(f"\nerror: time: still running after {timeout} s; see what it waits for, or raise --timeout\n")
            return False
        finally:
            with contextlib.suppress(psutil.NoSuchProcess):
                for child in [*process.children(recursive=True), process]:
                    with contextlib.suppress(psutil.NoSuchProcess):
                        child.kill()


def keep(folder: Path, log: Path) -> Path:
    (folder / "kept").mkdir(exist_ok=True)
    return Path(shutil.copy(log, folder / "kept"))


def slurm_jobs(folder: Path, timeout: int, caller: dict[str, str]) -> Lines:
    """caller: the environment from before the site was loaded, as a Slurm job loads that itself."""
    if not shutil.which("sbatch"):
        yield "fail", "Slurm jobs", "no sbatch on PATH", "run this on a login node, or leave --submit out"
        return
    # jobs read and write a copy, so that nothing of theirs stays in the experiments' folders
    ignored = shutil.ignore_patterns("__pycache__", "results", "output", "?pu_memory", "profile", "*.out", "wandb*")
    for name in ("scripts", "ds_configs", "fsdp_configs", "data", "experiments"):
        shutil.copytree(REPOSITORY / name, folder / name, ignore=ignored)
    if (REPOSITORY / ".venv").exists():
        (folder / ".venv").symlink_to(REPOSITORY / ".venv")
    gpu = os.environ.get("REQUIRE_GPU") != "0"
    variables = {"SBATCH_TIMELIMIT": str(timeout // 60 + 1)} | tiny_variables(folder, caller, gpu)
    submit = folder / "experiments" / "submit.sh"
    ids = {}
    try:
        for job in JOBS:
            done, said = command("bash", submit, job, env=variables, cwd=folder, timeout=120)
            if done:
                ids[job] = said.splitlines()[-1].split()[0]
            else:
                what, _, way_out = last_line(said).partition("; ")
                yield "fail", f"sbatch {job}", what, way_out or "correct the site file or the directives"
        deadline = time.monotonic() + timeout
        if ids:
            waiting = f"waiting up to {timeout} s for the jobs {', '.join(ids.values())}"
            print(f"{waiting}: in the queue, then compiling DeepSpeed's optimizers the first time", flush=True)
        for job in list(ids):
            state, reason, log = wait_for_job(ids[job], deadline)
            if state == "COMPLETED":
                yield "ok", job, state
            else:
                said = (
                    f"{last_line(log.read_text(errors='replace'))}; read {keep(folder, log)}" if log.is_file() else ""
                )
                if state in UNFINISHED:
                    said = f"{said or 'no log yet'}; cancelled: raise --timeout, or use a reservation"
                yield "fail", job, f"{state} ({reason})", said or "see scontrol show job, and slurmctld's log"
            if state not in UNFINISHED:
                del ids[job]
    finally:
        if ids:
            command("scancel", *ids.values())


def wait_for_job(job_id: str, deadline: float) -> tuple[str, str, Path]:
    """Its state once it has ended or the time is up, Slurm's reason, and its log. Not sbatch --wait, which can hang."""
    while True:
        known, said = command("scontrol", "show", "job", job_id)
        if not known:
            return "UNKNOWN", last_line(said), Path("/none")
        fields = dict(re.findall(r"(JobState|Reason)=(\S+)", said)) | dict(re.findall(r"^ +(StdOut)=(.*)$", said, re.M))
        if fields["JobState"] not in UNFINISHED or time.monotonic() > deadline:
            return fields["JobState"], fields["Reason"], Path(fields["StdOut"])
        time.sleep(2)
