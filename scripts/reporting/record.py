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


Part = TypeVar("Part")
OrDefault = Annotated[Part, BeforeValidator(absent)]
Count = Annotated[int, Field(ge=0, le=10**15)]
Time = Annotated[AwareDatetime, BeforeValidator(time)]
Measured = Annotated[float, AfterValidator(measured)]
Loss = Annotated[float, AfterValidator(loss)]
Text = Annotated[str | None, BeforeValidator(lambda value: value if value is None else str(value))]


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


class Knob(Typed):
    effective: str | None = None


class Knobs(Typed):
    precision: OrDefault[Knob] = Knob()


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
    knobs: OrDefault[Knobs] = Knobs()
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
    overrides: OrDefault[list[str]] = []  # in what the job differs from its script, such as "nodes: 3 instead of 2"


def read_record(path: Path) -> Record:
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
