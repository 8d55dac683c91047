"""The run record ``results/<job_id>.json``: everything that is later said about a run comes from here.

One description of it for who writes it (records/writer.py), who closes it (the training itself, a watchdog, or
job/end_of_job.py for a job that was killed) and who reads it (reporting/, benchmarks/). A field that is not described
here stays in the file as it is.

Schema 1. Written by rank 0, replaced atomically. A value that could not be measured is null, and `missing`
gives the reason under the same name; a number that is not finite is null as well.
"""

import signal
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer

from shared.errors import STOPPED
from shared.json_files import read_checked, write_json

SCHEMA: Literal[1] = 1
WITHOUT_A_WORD = "ended without a word: its node failed, or it was killed"
STOPPING_SIGNALS = (signal.SIGHUP, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)
Time = Annotated[AwareDatetime, PlainSerializer(datetime.isoformat)]  # UTC


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Restart(Part):
    """The begin of an attempt, and of the one before it when it began and ended."""

    time: Time | None = None
    reason: str | None = None  # how the one before ended
    step: int | None = None  # that it goes on from
    started: Time | None = None
    finished: Time | None = None


class Stop(Part):
    signal: str
    step: int
    checkpoint: str


class Hardware(Part):
    gpu: str | None = None  # name
    gpus: int | None = None  # on all nodes
    gpu_memory_mib: int | None = None
    cpu: str | None = None
    cpus: int | None = None  # of one node


class Git(Part):
    commit: str | None = None
    dirty: bool | None = None  # true if a file that the run reads differed from it


class Knob(Part):
    requested: Any = None
    effective: Any = None


class Settings(Part):
    """Those that the report computes with or names; all other knobs, and each other flag given, are there as well."""

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


class Train(Part):
    """The Trainer's numbers include evaluation and saving, the steady ones are of steps alone, warm-up left out.

    Of all attempts together, each up to the checkpoint that was gone on from.
    """

    steps: int | None = None
    loss_mean: float | None = None  # the Trainer's
    loss_last: float | None = None  # last logged
    runtime_s: float | None = None  # the Trainer's, and the next two
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    steady_samples_per_second: float | None = None
    steady_steps_per_second: float | None = None
    steady_steps: int | None = None
    warm_up_seconds: float | None = None  # from the begin of this attempt's training to that of its fourth step
    real_tokens: int | None = None
    padding_tokens: int | None = None
    counted_tokens: int | None = None  # labels that count in the loss
    steady_tokens_per_second: float | None = None  # real tokens of all ranks
    mfu_percent: float | None = None
    # What MFU is a share of, in 10^12 operations per second of one rank: the GPU's published peak, else measured while
    # all ranks compute
    matmul_peak_tflops: float | None = None


class Profile(Part):
    """Of a rank with --profile: seconds of a step, and of these the parts; also steps, and trace (its file)."""

    seconds_per_step: float
    data: float = 0
    forward: float = 0
    backward: float = 0
    optimizer: float = 0
    communication: float = 0  # with nothing computed beside it
    other: float = 0
    hidden_communication: float = 0


class PeakGpu(Part):
    """As PyTorch counted up to the end of training."""

    allocated_mib: float
    reserved_mib: float


class Held(Part):
    """Bytes that a rank held of the model, in the middle of the training's second step."""

    parameters: int
    gradients: int | None = None  # while they are accumulated
    optimizer_state: int  # with fp32 masters


class Record(Part):
    """The whole file. A run that failed has few of the fields."""

    version: Literal[1] = Field(default=SCHEMA, alias="schema")
    status: Literal["running", "completed", "failed", "oom", "timeout", "stopped"]
    exit_code: int | None = None  # of the training; null while it runs
    reason: str | None = None  # why it failed: the process that ended first, a failed node, or a rank that hung
    job_id: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    command: list[str] = []  # paths below the repository are relative to it, as in settings
    started: Time | None = None
    finished: Time | None = None
    resumed_from: str | None = None
    output_dir: str | None = None
    attempt: int = 1  # more when this job id was started again
    restarts: list[Restart] = []  # one for each attempt but the first; all else is of the last attempt
    overrides: list[str] = []  # directives of the .slurm file that were given otherwise at submission
    stop: Stop | None = None  # of a run that was stopped
    nodes: list[str] = []  # host names, in rank order
    pid: int | None = None  # of rank 0, on the first node
    world_size: int | None = None  # number of ranks
    hardware: Hardware = Hardware()
    git: Git | None = None
    # Of the job's bandwidth test: bus_bandwidth_gb_per_s, ranks, message_bytes, iterations (all-reduces measured),
    # backend, algorithm, transport
    bandwidth: dict[str, Any] | None = None
    versions: dict[str, str] = {}  # of the workshop (its pyproject.toml), Python and packages
    knobs: dict[str, Knob] = {}
    settings: Settings = Settings()
    origins: dict[str, str] = {}  # flag -> who gave it: flag, submission, site, experiment, variable
    # model: of its config.json, what is not transformers' default; deepspeed, fsdp: in effect, every "auto" filled in
    configs: dict[str, Any] | None = None
    parameters: int | None = None  # tied ones once
    steps_per_epoch: int | None = None  # optimizer steps
    train_size: int | None = None
    eval_size: int | None = None
    questions_cut: dict[str, int] | None = None  # train, eval: how many lost the end of their context to --max_length
    eval: list[Evaluation] = []
    train: Train | None = None
    exact_match: float | None = None  # percent over eval_size questions
    f1: float | None = None
    # train/steps_per_second_mean, train/samples_per_second_mean (the steady rates), and means over steps and ranks:
    # avg_gpu_util_%, std_gpu_util_%, avg_mem_alloc_MB, avg_mem_reserved_MB, avg_mem_total_MB; on the CPU
    # avg_cpu_util_%, std_cpu_util_%, avg_process_mem_MB
    callbacks: dict[str, float | None] = {}
    profile: list[Profile] | None = None  # per rank, as the next four
    held: list[Held] | None = None
    peak_gpu_memory: list[PeakGpu] | None = None
    # Page-locked CPU memory, as PyTorch counted it: active_mib (blocks in use), allocated_mib (with those kept)
    peak_pinned_memory: list[dict[str, float]] | None = None
    peak_process_mib: list[float] | None = None  # largest resident memory of the process, up to the end of the run
    missing: dict[str, str] = {}  # name -> why there is no value


def read_record(path: Path) -> Record:
    """The record in a file. Raises WorkshopError (exit code 2) with the field that is wrong, when it is none."""
    return read_checked(path, Record, "run record", "give results/<job_id>.json of a run, or move the file away")


def write_record(path: Path, record: Record) -> None:
    """Replace the file in one step. OSError when it cannot be written."""
    write_json(path, record.model_dump(mode="json", by_alias=True, exclude_unset=True))


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)


def outcome(exit_code: int) -> str:
    """Status of a run that ended with this exit code."""
    if exit_code == 0:
        return "completed"
    return "stopped" if exit_code == STOPPED or exit_code - 128 in STOPPING_SIGNALS else "failed"


def change_record(path: Path, **fields: object) -> Record:
    """Replace these fields of the record in a file. OSError when the file cannot be written."""
    record = read_record(path).model_copy(update=fields)
    write_record(path, record)
    return record
