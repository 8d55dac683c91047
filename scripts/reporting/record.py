"""What the report reads of a run record, typed: whatever the file holds, behind this module the types are right.

The fields are described in training/record.py. Those that the report does not read may hold anything.
"""

import math
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, AwareDatetime, BaseModel, BeforeValidator, ConfigDict, Field, ValidationError
from pydantic_core import PydanticUseDefault

from reporting.files import open_file

LARGEST_FILE = 2**26  # bytes; a record has some ten thousand
LARGEST_LOSS = 3.5e38  # of fp32, behind which there is only infinity
LONGEST_TEXT = 1000  # characters of a value that is only shown
MOST_SHOWN = 200  # entries of a part that is only shown


def absent(value: Any) -> Any:
    """A part that is null is as one that is not there."""
    if value is None:
        raise PydanticUseDefault
    return value


def time(value: Any) -> Any:
    return datetime.fromisoformat(value) if isinstance(value, str) else value


def measured(value: float) -> float:
    if value and not 1e-9 <= value <= 1e15:
        raise ValueError(f"{value:.3g} is nothing that can be measured")
    return value


def loss(value: float) -> float:
    """A loss that diverged is a result too: NaN and infinity may stand here."""
    if math.isfinite(value) and abs(value) > LARGEST_LOSS:
        raise ValueError(f"{value:.3g} is no loss")
    return value


def shown_words(value: Any) -> list[str]:
    """What is only shown may be anything: a list as texts, anything else as none."""
    return [in_short(word) for word in value[:MOST_SHOWN]] if isinstance(value, list) else []


def by_name(value: Any) -> dict[str, Any]:
    """A part whose entries are only shown; one that has no names has no entries."""
    return {in_short(name): value[name] for name in list(value)[:MOST_SHOWN]} if isinstance(value, dict) else {}


def in_short(value: Any) -> str:
    """A value that is only shown, as text; one that is a list or an object is no value."""
    if isinstance(value, list | dict):
        return "(not readable)"
    text = str(value)
    return text if len(text) <= LONGEST_TEXT else f"{text[:LONGEST_TEXT]}… ({len(text)} characters)"


Part = TypeVar("Part")
OrDefault = Annotated[Part, BeforeValidator(absent)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Time = Annotated[AwareDatetime, BeforeValidator(time)]
Measured = Annotated[float, AfterValidator(measured)]
Loss = Annotated[float, AfterValidator(loss)]
Text = Annotated[str | None, BeforeValidator(lambda value: value if value is None else str(value))]
ShownText = Annotated[str | None, BeforeValidator(lambda value: value if value is None else in_short(value))]


class Typed(BaseModel):
    """Nothing is converted: "5" is no number, true is none either. Unknown fields are left out."""

    model_config = ConfigDict(strict=True, frozen=True, str_max_length=10_000)


class Hardware(Typed):
    gpu: str | None = None
    gpus: Count | None = None
    cpu: str | None = None
    cpus: Count | None = None


class Git(Typed):
    commit: str | None = None
    dirty: bool | None = None


class KnobValues(Typed):
    requested: ShownText = None
    effective: ShownText = None


AnyKnob = Annotated[KnobValues, BeforeValidator(by_name)]


class Knobs(Typed):
    """Precision, by which runs compare, and all others, by their names."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, AnyKnob]

    precision: AnyKnob = KnobValues()


class Settings(Typed):
    """Any other setting is kept as text, to be compared."""

    model_config = ConfigDict(extra="allow")
    __pydantic_extra__: dict[str, Text]

    model_name: str | None = None
    num_layers: Count | None = None
    per_device_train_batch_size: Count | None = None
    samples_per_gpu: Count | None = None
    train_size: Count | None = None
    fp16: bool | None = None
    bf16: bool | None = None
    em_f1: bool | None = None
    torch_compile: bool | None = None
    profile: bool | None = None


class Evaluation(Typed):
    epoch: Measured
    loss: Loss | None = None
    samples_per_second: Measured | None = None


class Train(Typed):
    loss_mean: Loss | None = None
    runtime_s: Measured | None = None
    samples_per_second: Measured | None = None
    steps_per_second: Measured | None = None
    steady_samples_per_second: Measured | None = None
    warm_up_seconds: Measured | None = None
    real_tokens: Count | None = None
    padding_tokens: Count | None = None
    steady_tokens_per_second: Measured | None = None
    mfu_percent: Measured | None = None


class EstimatedStep(Typed):
    """Of an optimizer step, in seconds; samples_per_second of all ranks."""

    seconds: Measured | None = None
    samples_per_second: Measured | None = None
    compute: Measured | None = None
    optimizer: Measured | None = None
    communication: Measured | None = None
    hidden: Measured = 0  # of the communication, that which runs beside the computing


class Estimate(Typed):
    """What the run predicted of itself before it was measured."""

    gpu_mib: Measured | None = None
    node_mib: Measured | None = None
    step: OrDefault[EstimatedStep] = EstimatedStep()


class Bandwidth(Typed):
    bus_bandwidth_gb_per_s: Measured | None = None


class PeakGpu(Typed):
    allocated_mib: Measured | None = None
    reserved_mib: Measured | None = None


class Profile(Typed):
    """Seconds of a step of one rank."""

    seconds_per_step: Measured
    data: Measured = 0
    forward: Measured = 0
    backward: Measured = 0
    optimizer: Measured = 0
    communication: Measured = 0
    other: Annotated[float, Field(ge=-1e15, le=1e15)] = 0  # what is left, so it may be a little less than nothing
    hidden_communication: Measured = 0


class Restart(Typed):
    """That the job went on. step: from which, 0 from the beginning. started, finished: of the part before."""

    step: Count | None = None
    started: Time | None = None
    finished: Time | None = None


class Record(Typed):
    """A record of schema 1. A run that failed has few of the fields, but always `status` and `settings`."""

    version: int | None = Field(default=None, alias="schema")
    status: Literal["running", "completed", "failed", "oom", "timeout", "stopped"]
    settings: Settings
    job_id: Annotated[str, Field(pattern=r"^[ -.0-~]{1,64}$")] | None = None  # goes into file names: ASCII without /
    exit_code: Annotated[int, Field(ge=-255, le=255)] | None = None
    experiment: str | None = None
    started: Time | None = None
    finished: Time | None = None
    output_dir: str | None = None
    nodes: OrDefault[list[str]] = []
    pid: Annotated[int, Field(ge=1, le=2**22)] | None = None
    world_size: Count | None = None
    hardware: OrDefault[Hardware] = Hardware()
    git: OrDefault[Git] = Git()
    command: Annotated[list[str], BeforeValidator(shown_words)] = []
    versions: Annotated[dict[str, ShownText], BeforeValidator(by_name)] = {}
    knobs: Annotated[Knobs, BeforeValidator(by_name)] = Knobs.model_validate({})
    parameters: Count | None = None
    steps_per_epoch: Count | None = None
    train_size: Count | None = None
    eval_size: Count | None = None
    eval: OrDefault[list[Evaluation]] = []
    train: OrDefault[Train] = Train()
    exact_match: Measured | None = None
    f1: Measured | None = None
    callbacks: OrDefault[dict[str, Measured | None]] = {}
    missing: OrDefault[dict[str, str]] = {}
    attempt: Count | None = None  # 1 for the first
    restarts: OrDefault[list[Restart]] = []  # one for each attempt but the first
    estimate: OrDefault[Estimate] = Estimate()
    bandwidth: OrDefault[Bandwidth] = Bandwidth()
    profile: OrDefault[list[Profile]] = []  # one for each rank
    peak_gpu_memory: OrDefault[list[PeakGpu]] = []  # one for each rank
    overrides: OrDefault[list[str]] = []  # in what the job differs from its script, such as "nodes: 3 instead of 2"


def read_run_record(path: Path) -> Record:
    """The record in a file. OSError when it cannot be read, ValueError with the reason when it is none."""
    return read_typed(path, Record, "run record", LARGEST_FILE)


Model = TypeVar("Model", bound=Typed)


def read_typed(path: Path, model: type[Model], what: str, largest: int) -> Model:
    """The content of a JSON file of `largest` bytes at most.

    OSError when it cannot be read, ValueError with the reason when it is no `what`.
    """
    with open_file(path) as file:
        content = file.read(largest + 1)
    if len(content) > largest:
        raise ValueError(f"is larger than {largest:,} bytes")
    try:
        return model.model_validate_json(content)
    except ValidationError as error:
        first = error.errors(include_url=False, include_context=False, include_input=False)[0]
        where = ".".join(map(str, first["loc"]))
        raise ValueError(f"is no {what} ({where}: {first['msg']})" if where else
                         f"is no {what} ({first['msg']})") from error  # fmt: skip
