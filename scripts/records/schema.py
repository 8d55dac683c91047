"""Schema of the run record: ``results/<job_id>.json`` of the training, and ``results/jobs/<job_id>.json`` of its job.

`read_record` joins both files, and the report takes the facts about a run from it. The training writes the first file
with records/writer.py. The job writes the second file with job/end_of_job.py: how each of its attempts ended. A field
that is not described here is kept unchanged.

This is schema 1. Each file is replaced atomically. A value that could not be measured is null, and `missing` gives the
reason under the same name. A number that is not finite is null too.
"""

import os
import re
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer

from shared.errors import STOPPED, STOPPING_SIGNALS, WorkshopError
from shared.json_files import read_checked, write_json

SCHEMA: Literal[1] = 1
JOB_ID = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}")  # it is part of file names
LOCK = ".lock"  # the file that a running job holds locked in results/.<job_id>, and in its output folder
WITHOUT_A_WORD = "ended without a word: its node failed, or it was killed"
Time = Annotated[AwareDatetime, PlainSerializer(datetime.isoformat)]  # in UTC, except in Pause

Status = Literal["running", "completed", "failed", "oom", "timeout", "stopped"]


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Restart(Part):
    """Start of a later attempt, and start and end of the previous attempt."""

    time: Time | None = None
    reason: str | None = None  # how the previous attempt ended
    step: int | None = None  # step of the checkpoint that this attempt resumes from
    started: Time | None = None  # start and end of the previous attempt
    finished: Time | None = None


class Stop(Part):
    signal: str
    step: int
    checkpoint: str


class Hardware(Part):
    gpu: str | None = None  # name of a GPU
    gpus: int | None = None  # number on all nodes
    gpu_memory_mib: int | None = None
    gpu_power_limit_w: float | None = None  # the enforced limit, which the site may have lowered
    cpu: str | None = None
    cpus: int | None = None  # number on one node


class Git(Part):
    commit: str | None = None
    dirty: bool | None = None  # true if a file that the run reads differed from the commit


class KnobValues(Part):
    requested: Any = None
    effective: Any = None


class RecordedSettings(Part):
    """Knobs that the report uses. The record also has all other knobs and flags that were given."""

    model_name: str | None = None
    from_scratch: bool | None = None
    num_layers: int | None = None
    per_device_train_batch_size: int | None = None
    samples_per_gpu: int | None = None
    train_size: int | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    em_f1: bool | None = None
    torch_compile: bool | None = None
    profile: bool | None = None


class Evaluation(Part):
    epoch: float
    step: int | None = None
    loss: float | None = None
    runtime_s: float | None = None
    samples_per_second: float | None = None


class Pause(Part):
    """Time of an evaluation or of saving, in which the training makes no steps, on the clock of the first node.

    The times have the zone of this node and not UTC, because nvidia-smi logs local times without their zone.
    """

    what: Literal["evaluation", "saving"]
    started: Time
    finished: Time


class Train(Part):
    """Measurements of the training over all attempts.

    An attempt counts up to the checkpoint from which the next attempt resumed.

    The Trainer's numbers include evaluation and saving. The steady rates cover only optimizer steps after the warm-up.
    """

    steps: int | None = None
    loss_mean: float | None = None  # the Trainer's mean loss
    loss_last: float | None = None  # the last logged loss
    runtime_s: float | None = None  # measured by the Trainer, as are the next two fields
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    steady_samples_per_second: float | None = None
    steady_steps_per_second: float | None = None
    steady_steps: int | None = None
    warm_up_seconds: float | None = None  # from the start of this attempt's training to the start of its fourth step
    real_tokens: int | None = None
    padding_tokens: int | None = None
    counted_tokens: int | None = None  # labels that count in the loss
    steady_tokens_per_second: float | None = None  # real tokens on all ranks
    mfu_percent: float | None = None
    # Peak of one rank in 10^12 operations per second, for MFU. It is the GPU's published peak, or the peak
    # measured while all ranks compute if none is published
    matmul_peak_tflops: float | None = None


class Energy(Part):
    """Energy of the job's GPUs, from NVML's counters. CPUs, memory, network and cooling are not included.

    The steady values belong to the same optimizer steps as the steady rates, over all attempts.
    """

    # Joules of each GPU, in rank order. If they are unknown, `missing` gives one reason for all steady values here
    steady_joules: list[float] | None = None
    steady_joules_sum: float | None = None
    joules_per_question: float | None = None
    joules_per_1000_tokens: float | None = None  # real tokens
    mean_watts: float | None = None  # of one GPU
    # All GPUs and all attempts, from the start of the training to the end of the run: with evaluation and saving
    kwh: float | None = None


class GpuActivity(Part):
    """Activity of a node's first GPU during steady steps, as a mean over its SMs and over time (NVML's GPM)."""

    seconds: float
    sm_percent: float  # SMs that were busy
    tensor_percent: float  # tensor cores that compute
    dram_percent: float  # bandwidth of GPU memory in use


class Profile(Part):
    """Seconds of a step and of its parts on one rank, from --profile.

    The record also has the number of profiled `steps` and the file of the `trace`.
    """

    seconds_per_step: float
    data: float = 0
    forward: float = 0
    backward: float = 0
    optimizer: float = 0
    communication: float = 0  # not overlapped with computation
    other: float = 0
    hidden_communication: float = 0  # overlapped with computation
    kernels_per_micro_batch: float | None = None  # in forward and backward pass; None on a CPU


class PeakGpu(Part):
    """Peak GPU memory of a rank up to the end of training, as PyTorch counts it."""

    allocated_mib: float
    reserved_mib: float


class Held(Part):
    """Bytes of model state that a rank holds in the middle of the training's second step."""

    parameters: int
    gradients: int | None = None  # null without gradient accumulation under DeepSpeed
    optimizer_state: int  # including fp32 masters


class Record(Part):
    """The whole run record. The record of a failed run has only some of the fields."""

    version: Literal[1] = Field(default=SCHEMA, alias="schema")
    status: Status
    exit_code: int | None = None  # exit code of the training, null while it runs
    reason: str | None = None  # why the run failed: an error line, the process that ended first, or a failed node
    job_id: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    command: list[str] = []  # paths in the repository are relative, as in settings
    started: Time | None = None
    finished: Time | None = None
    resumed_from: str | None = None
    output_dir: str | None = None
    attempt: int = 1  # more than 1 if this job id was started again
    restarts: list[Restart] = []  # one for each later attempt; all other fields describe the last attempt
    overrides: list[str] = []  # directives of the .slurm file that were changed at submission, from the job's part
    stop: Stop | None = None  # only in the record of a stopped run
    nodes: list[str] = []  # host names, in rank order
    pid: int | None = None  # process id of rank 0, on the first node
    world_size: int | None = None  # number of ranks
    hardware: Hardware = Hardware()
    git: Git | None = None
    # The job's bandwidth test: bus_bandwidth_gb_per_s, ranks, message_bytes, iterations (measured all-reduces),
    # backend, algorithm, transport
    bandwidth: dict[str, Any] | None = None
    container: str | None = None  # the words of CONTAINER, which name the image
    versions: dict[str, str] = {}  # versions of the workshop (from pyproject.toml), Python and packages
    knobs: dict[str, KnobValues] = {}
    settings: RecordedSettings = RecordedSettings()
    origins: dict[str, str] = {}  # flag -> source of its value: flag, submission, site, experiment, variable
    # model: the values of config.json that differ from transformers' defaults. deepspeed, fsdp: the config in effect,
    # with every "auto" replaced by a value
    configs: dict[str, Any] | None = None
    parameters: int | None = None  # tied parameters count once, and adapters of LoRA count too
    trainable_parameters: int | None = None
    steps_per_epoch: int | None = None  # optimizer steps
    kind: str | None = None  # of the data: the name of a task, such as passage (scripts/tasks)
    train_size: int | None = None
    eval_size: int | None = None
    questions_cut: dict[str, int] | None = None  # train, eval: questions whose context was cut by --max_length
    answers_cut: dict[str, int] | None = None  # train, eval: questions whose answer is only in the part that was cut
    # Reason -> number of evaluation questions for which a right answer scores less than 100 or an empty one scores 100
    unfair_questions: dict[str, int] | None = None
    eval: list[Evaluation] = []
    pauses: list[Pause] = []  # pauses of all attempts, as the memory logs have all attempts
    train: Train | None = None
    exact_match: float | None = None  # percent of eval_size questions
    f1: float | None = None
    # The steady rates train/steps_per_second_mean and train/samples_per_second_mean, and means over steps and ranks:
    # avg_gpu_util_%, std_gpu_util_%, avg_mem_alloc_MB, avg_mem_reserved_MB and avg_mem_total_MB. On the CPU:
    # avg_cpu_util_%, std_cpu_util_% and avg_process_mem_MB
    callbacks: dict[str, float | None] = {}
    energy: Energy | None = None
    gpu_activity: list[GpuActivity] | None = None  # one entry per node
    profile: list[Profile] | None = None  # one entry per rank, as in the next four fields
    held: list[Held] | None = None
    peak_gpu_memory: list[PeakGpu] | None = None
    # Pinned CPU memory, as PyTorch counts it: active_mib (blocks in use), allocated_mib (with cached free blocks)
    peak_pinned_memory: list[dict[str, float]] | None = None
    peak_process_mib: list[float] | None = None  # largest resident memory of each rank, up to the end of the run
    missing: dict[str, str] = {}  # name of a field -> reason why it has no value


class Attempt(Part):
    """One attempt of a job: a start of run_job.py. It trains, or it ends before the training begins."""

    attempt: int
    started: Time | None = None
    finished: Time | None = None
    status: Status = "running"  # stopped as soon as the job gets a signal
    exit_code: int | None = None  # exit code of the job
    reason: str | None = None  # as in Record
    nodes: list[str] = []  # names in Slurm
    overrides: list[str] = []  # as in Record
    notes: list[str] = []  # what makes the job slower than its allocation allows


class JobRecord(Part):
    """Content of results/jobs/<job_id>.json. The job writes it, and the training does not."""

    version: Literal[1] = Field(default=SCHEMA, alias="schema")
    attempts: list[Attempt] = []  # oldest first


def read_record(path: Path) -> Record:
    """Read results/<job_id>.json, and add what the job noted about this attempt in results/jobs/<job_id>.json.

    Raises WorkshopError (exit code 2) that names the wrong field of an invalid record.
    """
    record = read_training(path)
    attempt = next((each for each in read_attempts(path) if each.attempt == record.attempt), None)
    if not attempt:
        return record
    joined: dict[str, object] = {"overrides": attempt.overrides or record.overrides}  # 1.0.0 had them in the record
    # A training that is slow to save may end after srun, and so after its job
    ended_later = record.finished and (not attempt.finished or record.finished > attempt.finished)
    if attempt.status != "running" and not ended_later:
        joined |= {"status": attempt.status, "exit_code": attempt.exit_code}
        joined |= {"finished": record.finished or attempt.finished}
    if joined.get("status", record.status) != "completed":
        joined["reason"] = attempt.reason or record.reason
    return record.model_copy(update=joined)


def read_training(path: Path) -> Record:
    """Read the part of the record that the training writes. Raises WorkshopError as `read_record` does."""
    return read_checked(path, Record, "run record", "give results/<job_id>.json of a run, or move the file away")


def check_job_id(job_id: str) -> None:
    """Raise WorkshopError (exit code 2) for an id that cannot be part of a file name."""
    if not JOB_ID.fullmatch(job_id):
        raise WorkshopError("JOB_ID", f"{job_id!r:.80} cannot name files", "give up to 64 letters, digits, . _ or -")


def job_path(path: Path) -> Path:
    """Return the path of the job's part of a record."""
    return path.parent / "jobs" / path.name


def read_attempts(path: Path) -> list[Attempt]:
    """Read the attempts of the job of a record, oldest first. A training run without a job has none."""
    if not os.path.exists(job_path(path)):
        return []
    return read_checked(job_path(path), JobRecord, "record of a job", "move the file away").attempts


def now() -> datetime:
    """Return the current time in UTC, in whole seconds."""
    return datetime.now(UTC).replace(microsecond=0)


def local_now() -> datetime:
    """Return the current time in the zone of this node, for `Pause`."""
    return datetime.now().astimezone()


def outcome(exit_code: int) -> str:
    """Return the status of a run that ended with this exit code."""
    if exit_code == 0:
        return "completed"
    return "stopped" if exit_code == STOPPED or exit_code - 128 in STOPPING_SIGNALS else "failed"


def write_attempts(path: Path, attempts: list[Attempt]) -> None:
    """Replace the job's part of a record. Raises OSError if it cannot be written."""
    job_path(path).parent.mkdir(parents=True, exist_ok=True)
    write_json(job_path(path), JobRecord(attempts=attempts).model_dump(mode="json", by_alias=True))
