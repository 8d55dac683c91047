"""The typed settings of a training, which every module takes: ``settings.data.max_length``.

train.py makes them from the command line (command_line.py), and the estimates and the report from a run record. They
never change: what is known later, such as the content of a config file, makes new settings by `dataclasses.replace`.
"""

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from config import CUSTOM_GPT, CUSTOM_SIZES, KNOBS, OTHER_DEFAULTS, DataArguments, Knob, ModelArguments
from shared.errors import WorkshopError

Precision = Literal["fp16", "bf16", "fp32"]
Arguments = TypeVar("Arguments")
# The possible sources of a value, highest precedence first. unset: the knob has neither a value nor a default
ORIGINS = ("flag", "submission", "site", "experiment", "variable", "default", "unset")


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The flags of transformers.TrainingArguments that the workshop reads itself, with the names they have there."""

    num_train_epochs: float
    max_steps: int = -1  # -1: as many as num_train_epochs needs
    per_device_train_batch_size: int  # sequences per rank and micro batch
    per_device_eval_batch_size: int | None = None  # None: the training's
    gradient_accumulation_steps: int
    learning_rate: float
    label_smoothing_factor: float = 0.0
    optim: str = "adamw_torch_fused"
    train_sampling_strategy: str
    fp16: bool | None  # None: not decided yet, as for bf16
    bf16: bool | None
    tf32: bool | None = None
    use_cpu: bool = False
    activation_checkpointing: bool | None
    gradient_checkpointing: bool | None = None  # the name that activation_checkpointing had before
    torch_compile: bool
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    deepspeed: str | None = None  # a file of ds_configs/
    fsdp: object = None  # True, or an option string of transformers 4
    fsdp_config: str | None = None  # a file of fsdp_configs/
    save_strategy: str
    output_dir: str | None
    run_name: str | None
    report_to: str
    resume_from_checkpoint: str | None = None
    ddp_timeout: int  # seconds


@dataclass(frozen=True)
class RankFlags:
    """The flags of rehearse.py, and of all estimates."""

    gpus: int = field(default=1, metadata={"help": "GPUs of the whole job, one rank each."})
    nodes: int = field(default=1, metadata={"help": "Nodes, with equally many GPUs each."})


@dataclass(frozen=True)
class StepFlags(RankFlags):
    """The flags of estimate_time.py, which are also flags of estimate_memory.py."""

    matmul_tflops: float | None = field(
        default=None,
        metadata={
            "help": "10^12 operations per second of one GPU in matrix products: at most matmul_peak_tflops of a record."
        },
    )
    memory_bandwidth: float | None = field(
        default=None, metadata={"help": "GB/s of one GPU's memory, read and written."}
    )
    bus_bandwidth: float | None = field(
        default=None, metadata={"help": "GB/s between the ranks: bus_bandwidth_gb_per_s of measure_bandwidth.py."}
    )


@dataclass(frozen=True)
class EstimateArguments(StepFlags):
    """The flags of the estimates. train.py has none of them."""

    compare: bool = field(default=False, metadata={"help": "List all config files, those that fit first."})
    knobs: bool = field(
        default=False, metadata={"help": "First all knobs, by where they come from, as a training prints them."}
    )
    gpu_memory: float | None = field(
        default=None, metadata={"help": "GiB of one GPU, for the verdict. Default: the one here."}
    )
    cpu_memory: float | None = field(
        default=None, metadata={"help": "GiB of one node, as in --mem of sbatch, for the verdict."}
    )


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one training.

    names: flag -> what the user typed, the flag or its variable. origins: flag -> who gave it, one of ORIGINS. Both
    hold only flags that were given. other_flags: the flags of TrainingArguments that only transformers reads.
    """

    model: ModelArguments
    data: DataArguments
    trainer: TrainerArguments
    estimate: EstimateArguments = EstimateArguments()
    other_flags: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    precision_note: str = ""  # why it is this precision, for the audit
    warnings: tuple[str, ...] = ()
    deepspeed_config: dict | None = None  # the content of trainer.deepspeed, once it is checked
    fsdp_config: dict | None = None  # the content of trainer.fsdp_config; {} for bare --fsdp

    @property
    def precision(self) -> Precision:
        if self.trainer.fp16:
            return "fp16"
        return "bf16" if self.trainer.bf16 else "fp32"

    @property
    def zero(self) -> dict:
        """The section zero_optimization of the DeepSpeed config; empty without DeepSpeed."""
        return (self.deepspeed_config or {}).get("zero_optimization", {})

    def flat(self) -> dict[str, Any]:
        """Flag -> value, of a training's flags, as the run record and the checkpoints keep them."""
        return {**asdict(self.model), **asdict(self.data), **asdict(self.trainer), **self.other_flags}

    def recorded(self) -> dict[str, Any]:
        """Return the values that define the run: each knob and each other flag that was given. No flag is a secret."""
        values = self.flat()
        flags = {knob.flag for knob in KNOBS} | set(OTHER_DEFAULTS) | {"seed"} | (self.names.keys() & values.keys())
        if self.model.model_name != CUSTOM_GPT:
            flags -= set(CUSTOM_SIZES)
        return {flag: values[flag] for flag in sorted(flags)}

    def knob_lines(self) -> list[str]:
        """All knobs with their values, grouped by who gave them, highest precedence first; then the warnings."""
        values = self.flat()
        shown: dict[str, list[str]] = {origin: [] for origin in ORIGINS}
        for knob in KNOBS:
            if knob.flag not in CUSTOM_SIZES or self.model.model_name == CUSTOM_GPT:
                value = values[knob.flag]
                origin = "unset" if value is None else self.origins.get(knob.flag, "default")
                shown[origin].append(assignment(knob, value))
        lines = ["knobs, by where they come from:"]
        for origin, texts in shown.items():
            if texts:
                lines.append(
                    textwrap.fill(
                        " ".join(texts),
                        width=120,
                        initial_indent=f"  {origin:12}",
                        subsequent_indent=" " * 14,
                        break_long_words=False,
                        break_on_hyphens=False,
                    )
                )
        return lines + [f"warning: {text}" for text in self.warnings]

    def error(self, flag: str, what: str, way_out: str) -> WorkshopError:
        """Return the error about a flag, by the name that the user gave it: the flag or its variable."""
        return WorkshopError(self.names.get(flag, f"--{flag}"), what, way_out)


def assignment(knob: Knob, value: object) -> str:
    """``VARIABLE=value`` as a shell would read it; only the variable for a knob without a value."""
    if value is None:
        return knob.variable
    return f"{knob.variable}={shlex.quote(f'{value:g}' if isinstance(value, float) else str(value))}"


def build_settings(values: Mapping[str, Any], **others: Any) -> Settings:
    """Make settings from flag -> value, such as a parsed command line or the settings in a run record.

    values: at least all knobs of config.py. others: fields of `Settings` that are not flags.
    """
    kinds = (ModelArguments, DataArguments, TrainerArguments, EstimateArguments)
    typed = {each.name for kind in kinds for each in fields(kind)}
    return Settings(
        model=build_arguments(ModelArguments, values),
        data=build_arguments(DataArguments, values),
        trainer=build_arguments(TrainerArguments, values),
        estimate=build_arguments(EstimateArguments, values),
        other_flags={flag: value for flag, value in values.items() if flag not in typed},
        **others,
    )


def build_arguments(kind: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """The dataclass `kind` from its fields among the values; a field that is missing has its default."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # a dataclass, which no type says
    return kind(**{name: values[name] for name in names if name in values})
