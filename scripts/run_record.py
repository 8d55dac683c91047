"""The run record ``results/<job_id>.json``: everything that is later said about a run comes from here.

One description of it for who writes it (training/record.py), who finishes it (job/finish.py) and who reads it
(reporting/). A field that is not described here stays in the file as it is.

Schema 1. Written by rank 0, replaced atomically. A value that could not be measured is null, and `missing`
gives the reason under the same name; a number that is not finite is null as well.

    schema              1
    status              running | completed | failed | oom | timeout | stopped
    exit_code           of the training, null while it runs
    job_id, experiment, run_name, command, started, finished (UTC), resumed_from, output_dir
    attempt             1, or more when this job id was started again
    restarts            one entry for each attempt but the first: time, reason (how the one before ended), step that it
                        goes on from, and started and finished of the one before; all else is of the last attempt
    overrides           directives of the .slurm file that were given otherwise at submission
    stop                null, or of a run that was stopped: signal, step, checkpoint
    nodes               host names, in rank order
    pid                 of rank 0, on the first node
    world_size          number of ranks
    hardware            gpu (name), gpus (on all nodes), gpu_memory_mib, cpu, cpus (of one node)
    git                 commit, dirty (whether files differed from it)
    bandwidth           of the job's bandwidth test, null without one: bus_bandwidth_gb_per_s, ranks, message_bytes,
                        iterations (all-reduces measured), backend, algorithm, transport
    versions            python and packages
    knobs               name -> requested, effective
    settings            value of every knob, and of each other flag that was given; paths below the repository are
                        relative to it, as in command
    configs             model: of its config.json, what is not transformers' default; deepspeed, fsdp: in effect, every
                        "auto" filled in, null without it
    parameters          number of them, tied ones once
    steps_per_epoch     optimizer steps
    train_size, eval_size
    questions_cut       train, eval: how many of them have lost the end of their context to --max_length
    eval                list, one entry per evaluation: epoch, step, loss, runtime_s, samples_per_second
    train               steps, loss_mean (the Trainer's), loss_last (last logged), runtime_s, samples_per_second,
                        steps_per_second (the Trainer's: they include evaluation and saving),
                        steady_samples_per_second, steady_steps_per_second, steady_steps (steps alone, warm-up left
                        out), warm_up_seconds (from the begin of this attempt's training to that of its fourth
                        step; torch.compile compiles then);
                        real_tokens, padding_tokens, counted_tokens (labels that count in the loss),
                        steady_tokens_per_second (real tokens of all ranks, in these steps), mfu_percent (of them),
                        matmul_peak_tflops (that MFU is a share of: of one rank, in 10^12 operations per second; the
                        GPU's published one, else measured while all ranks compute);
                        of all attempts together, each up to the checkpoint that was gone on from
    exact_match, f1     percent over eval_size questions
    callbacks           train/steps_per_second_mean, train/samples_per_second_mean (the steady rates), and means over
                        steps and ranks: avg_gpu_util_%, std_gpu_util_%, avg_mem_alloc_MB, avg_mem_reserved_MB,
                        avg_mem_total_MB; on the CPU avg_cpu_util_%, std_cpu_util_%, avg_process_mem_MB
    profile             of a run with --profile, per rank: steps, seconds_per_step, and of these data, forward,
                        backward, optimizer, communication (with nothing computed beside it), other;
                        hidden_communication; trace (its file)
    peak_gpu_memory     per rank: allocated_mib, reserved_mib, as PyTorch counted up to the end of training
    peak_pinned_memory  of page-locked CPU memory, per rank: active_mib (blocks in use), allocated_mib (with those kept
                        for later use), as PyTorch counted up to the end of training
    peak_process_mib    per rank: largest resident memory of the process, up to the end of the run
    missing             name -> why there is no value
"""

from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, PlainSerializer, ValidationError

from errors import WorkshopError
from json_files import write_json

SCHEMA: Literal[1] = 1
Time = Annotated[AwareDatetime, PlainSerializer(datetime.isoformat)]


class Part(BaseModel):
    model_config = ConfigDict(extra="allow", frozen=True)


class Restart(Part):
    time: Time | None = None
    reason: str | None = None
    step: int | None = None
    started: Time | None = None
    finished: Time | None = None


class Stop(Part):
    signal: str
    step: int
    checkpoint: str


class Hardware(Part):
    gpu: str | None = None
    gpus: int | None = None
    gpu_memory_mib: int | None = None
    cpu: str | None = None
    cpus: int | None = None


class Git(Part):
    commit: str | None = None
    dirty: bool | None = None


class Bandwidth(Part):
    bus_bandwidth_gb_per_s: float | None = None


class Knob(Part):
    requested: Any = None
    effective: Any = None


class Settings(Part):
    """Those that the report computes with or names; all others are there as well."""

    model_name: str | None = None
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
    steps: int | None = None
    loss_mean: float | None = None
    loss_last: float | None = None
    runtime_s: float | None = None
    samples_per_second: float | None = None
    steps_per_second: float | None = None
    steady_samples_per_second: float | None = None
    steady_steps_per_second: float | None = None
    steady_steps: int | None = None
    warm_up_seconds: float | None = None
    real_tokens: int | None = None
    padding_tokens: int | None = None
    counted_tokens: int | None = None
    steady_tokens_per_second: float | None = None
    mfu_percent: float | None = None
    matmul_peak_tflops: float | None = None


class Profile(Part):
    seconds_per_step: float
    data: float = 0
    forward: float = 0
    backward: float = 0
    optimizer: float = 0
    communication: float = 0
    other: float = 0
    hidden_communication: float = 0


class PeakGpu(Part):
    allocated_mib: float
    reserved_mib: float


class PeakPinned(Part):
    active_mib: float
    allocated_mib: float


class Record(Part):
    """The whole file. A run that failed has few of the fields."""

    version: Literal[1] = Field(default=SCHEMA, alias="schema")
    status: Literal["running", "completed", "failed", "oom", "timeout", "stopped"]
    exit_code: int | None = None
    job_id: str | None = None
    experiment: str | None = None
    run_name: str | None = None
    command: list[str] = []
    started: Time | None = None
    finished: Time | None = None
    resumed_from: str | None = None
    output_dir: str | None = None
    attempt: int = 1
    restarts: list[Restart] = []
    overrides: list[str] = []
    stop: Stop | None = None
    nodes: list[str] = []
    pid: int | None = None
    world_size: int | None = None
    hardware: Hardware = Hardware()
    git: Git | None = None
    bandwidth: Bandwidth | None = None
    versions: dict[str, str] = {}
    knobs: dict[str, Knob] = {}
    settings: Settings = Settings()
    configs: dict[str, Any] | None = None
    parameters: int | None = None
    steps_per_epoch: int | None = None
    train_size: int | None = None
    eval_size: int | None = None
    questions_cut: dict[str, int] | None = None
    eval: list[Evaluation] = []
    train: Train | None = None
    exact_match: float | None = None
    f1: float | None = None
    callbacks: dict[str, float | None] = {}
    profile: list[Profile] | None = None
    peak_gpu_memory: list[PeakGpu] | None = None
    peak_pinned_memory: list[PeakPinned] | None = None
    peak_process_mib: list[float] | None = None
    missing: dict[str, str] = {}


def read_record(path: Path) -> Record:
    """The record in a file. Raises WorkshopError (exit code 2) with the field that is wrong, when it is none."""
    way_out = "give results/<job_id>.json of a run, or move the file away"
    try:
        return Record.model_validate_json(path.read_bytes())
    except OSError as error:
        raise WorkshopError(path, error.strerror or "cannot be read", way_out) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the file"
        raise WorkshopError(path, f"is no run record ({field}: {first['msg']})", way_out) from error


def write_record(path: Path, record: Record) -> None:
    """Replace the file in one step. OSError when it cannot be written."""
    write_json(path, record.model_dump(mode="json", by_alias=True, exclude_unset=True))


def now() -> datetime:
    return datetime.now(UTC).replace(microsecond=0)
