"""Typed settings of a training run, which all modules use, such as ``settings.data.max_length``.

train.py builds the settings from the command line (command_line.py), and the report builds them from a run record. They
are immutable: to add a value later, such as the content of a config file, create a copy with `dataclasses.replace`.
"""

import shlex
import textwrap
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from typing import Any, Literal, TypeVar

from config import DEFAULTS, KNOBS, DataArguments, Knob, ModelArguments, facts
from shared.errors import WorkshopError

Precision = Literal["fp16", "bf16", "fp32"]
Arguments = TypeVar("Arguments")
# Possible origins of a value, highest precedence first. unset: the knob has neither a value nor a default
ORIGINS = ("flag", "submission", "site", "experiment", "variable", "default", "unset")


@dataclass(frozen=True, kw_only=True)
class TrainerArguments:
    """The flags of transformers.TrainingArguments that the workshop itself reads, under the same names."""

    num_train_epochs: float
    max_steps: int = DEFAULTS["max_steps"]
    per_device_train_batch_size: int  # sequences per rank and micro batch
    per_device_eval_batch_size: int | None = None  # None: per_device_train_batch_size
    gradient_accumulation_steps: int
    learning_rate: float
    label_smoothing_factor: float = 0.0
    optim: str = DEFAULTS["optim"]
    train_sampling_strategy: str = "random"
    fp16: bool | None  # None: not decided yet; the same holds for bf16
    bf16: bool | None
    tf32: bool | None = None
    use_cpu: bool = False
    activation_checkpointing: bool | None
    gradient_checkpointing: bool | None = None  # the older name of activation_checkpointing
    torch_compile: bool
    torch_compile_mode: str | None = None
    use_liger_kernel: bool = False
    deepspeed: str | None = None  # a file of ds_configs/
    fsdp: object = None  # True or an option string of transformers 4
    fsdp_config: str | None = None  # a file of fsdp_configs/
    save_strategy: str
    output_dir: str | None
    run_name: str | None
    report_to: str
    resume_from_checkpoint: str | None = None
    ddp_timeout: int  # seconds


@dataclass(frozen=True, kw_only=True)
class Settings:
    """All settings of one training run.

    names: flag -> the word that the user typed, either the flag or its variable. origins: flag -> origin of the value,
    one of ORIGINS. Both mappings hold only flags that were given. other_flags: the flags of TrainingArguments that only
    transformers reads.
    """

    model: ModelArguments
    data: DataArguments
    trainer: TrainerArguments
    estimate: Any = None  # the flags of an estimate, such as its number of GPUs: a dataclass of estimate/flags.py
    other_flags: Mapping[str, Any] = field(default_factory=dict)
    names: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    precision_note: str = ""  # the reason for the precision, for the audit
    requested_accumulation: int | None = None  # GRAD_ACC as given, if a restart on other ranks has changed it
    warnings: tuple[str, ...] = ()
    deepspeed_config: dict | None = None  # the checked content of trainer.deepspeed
    fsdp_config: dict | None = None  # the content of trainer.fsdp_config; {} for bare --fsdp

    @property
    def precision(self) -> Precision:
        if self.trainer.fp16:
            return "fp16"
        return "bf16" if self.trainer.bf16 else "fp32"

    @property
    def zero(self) -> dict:
        """The section zero_optimization of the DeepSpeed config, empty without DeepSpeed."""
        return (self.deepspeed_config or {}).get("zero_optimization", {})

    def flat(self) -> dict[str, Any]:
        """Return flag -> value of the training's flags, as the run record and the checkpoints store them."""
        return {**asdict(self.model), **asdict(self.data), **asdict(self.trainer), **self.other_flags}

    def recorded(self) -> dict[str, Any]:
        """Return the values that define the run: flags with a default, and those that were given. None is a secret."""
        values = self.flat()
        flags = DEFAULTS.keys() | (self.names.keys() & values.keys())
        return {flag: values[flag] for flag in sorted(flags) if self.has(facts(flag))}

    def has(self, knob: Knob) -> bool:
        """Return whether the model has the knob."""
        return knob.only_for in ("", self.model.model_name)

    def knob_lines(self) -> list[str]:
        """Return lines with all knobs and their values by origin, highest precedence first, then notes and warnings."""
        values = self.flat()
        shown: dict[str, list[str]] = {origin: [] for origin in ORIGINS}
        for knob in KNOBS:
            if self.has(knob):
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
        saved = f"will be saved in {self.trainer.output_dir or 'output/<job id>'}"
        if self.trainer.save_strategy == "no":
            saved = "will not be saved (SAVE_STRATEGY=no)"
        lines.append(f"the trained model {saved}")
        return lines + [f"warning: {text}" for text in self.warnings]

    def error(self, flag: str, what: str, remedy: str) -> WorkshopError:
        """Return an error about a flag, with the name that the user typed: the flag or its variable."""
        return WorkshopError(self.names.get(flag, f"--{flag}"), what, remedy)


def assignment(knob: Knob, value: object) -> str:
    """Return ``VARIABLE=value``, quoted for a shell, or only the variable for a knob without a value."""
    if value is None:
        return knob.variable
    return f"{knob.variable}={shlex.quote(f'{value:g}' if isinstance(value, float) else str(value))}"


def build_settings(values: Mapping[str, Any], estimate: type | None = None, **others: Any) -> Settings:
    """Build settings from flag -> value, such as a parsed command line or the settings in a run record.

    values: at least all knobs of config.py. estimate: the dataclass of an estimate's own flags, None for a training
    run. others: fields of `Settings` that are not flags.
    """
    kinds: tuple[type | None, ...] = (ModelArguments, DataArguments, TrainerArguments, estimate)
    typed = {each.name for kind in kinds if kind for each in fields(kind)}
    return Settings(
        model=build_arguments(ModelArguments, values),
        data=build_arguments(DataArguments, values),
        trainer=build_arguments(TrainerArguments, values),
        estimate=estimate and build_arguments(estimate, values),
        other_flags={flag: value for flag, value in values.items() if flag not in typed},
        **others,
    )


def build_arguments(kind: type[Arguments], values: Mapping[str, Any]) -> Arguments:
    """Build the dataclass `kind` from the values of its fields. A missing field gets its default."""
    names = [each.name for each in fields(kind)]  # type: ignore[arg-type]  # the TypeVar cannot be bound to dataclasses
    return kind(**{name: values[name] for name in names if name in values})
