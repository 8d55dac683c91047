"""Read the settings of a training run from flags and environment variables, and check them.

A flag takes precedence over its environment variable, and a variable takes precedence over the default. The knobs and
their defaults are in config.py.
"""

import argparse
import os
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments

from config import DEFAULTS, KNOBS, DataArguments, Knob, ModelArguments
from settings.hints import (
    FLAGS_OF_OTHER_PROGRAMS,
    UNREAD_VARIABLES,
    UNUSED_FLAGS,
    warn_of_unread_variables,
)
from settings.precision import resolve_precision
from settings.settings import Settings, build_settings
from settings.validation import check_settings, doubtful_choices
from shared.errors import OneLineErrors, WorkshopError, did_you_mean
from shared.paths import workshop_version

LATEST = "latest"  # value of --resume_from_checkpoint if the flag has no value


class Parser(HfArgumentParser, OneLineErrors):
    """HfArgumentParser that accepts the metadata of config.py's fields."""

    def add_argument(self, *names: str, knob: Knob | None = None, **details: Any) -> argparse.Action:
        """Add an argument. HfArgumentParser also passes the field's metadata, which argparse does not know."""
        if knob and knob.parse:
            details["type"] = knob.parse
        return super().add_argument(*names, **details)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """A formatter that shows the defaults and keeps the line breaks of the description."""


def build_parser(description: str, extra: type | None = None) -> Parser:
    """Build the parser of all flags of a training run. extra: dataclass of flags that only one script has."""
    kinds: Any = [kind for kind in (ModelArguments, DataArguments, TrainingArguments, extra) if kind]
    parser = Parser(kinds, description=description, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=workshop_version())
    actions = actions_by_flag(parser)
    actions["max_steps"].option_strings = [*actions["max_steps"].option_strings, "--steps"]
    parser._option_string_actions["--steps"] = actions["max_steps"]
    resume = actions["resume_from_checkpoint"]
    resume.nargs = "?"
    resume.const = LATEST
    resume.help = "Resume from this run folder or checkpoint; without a value, from the latest complete checkpoint."
    # HfArgumentParser adds these forms only to a flag whose default is True or False
    parser.add_argument("--no_em_f1", "--no-em-f1", dest="em_f1", action="store_false", default=None)
    actions["em_f1"].nargs, actions["em_f1"].const = "?", True
    for knob in KNOBS:
        actions[knob.flag].help = f"{actions[knob.flag].help} Variable {knob.variable}."
    return parser


def actions_by_flag(parser: Parser) -> dict[str, argparse.Action]:
    # A flag can have two actions, such as --em_f1 and --no_em_f1: return the first
    return {action.dest: action for action in reversed(parser._actions)}


def parse_command_line(
    description: str,
    argv: list[str] | None = None,
    extra: type | None = None,
    gpu: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Settings:
    """Read flags and variables, and check everything that needs neither a process group nor the data.

    extra: dataclass of the flags of an estimate, which only this script has. gpu: True if the training will have a
    GPU. By default, it is True if this machine has one. environment: the environment variables.
    Raises WorkshopError (exit code 2) for a user's mistake.
    """
    parser = build_parser(description, extra)
    defaults, variables = environment_values(parser, environment)
    parser.set_defaults(**defaults)
    arguments = sys.argv[1:] if argv is None else argv
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown(unknown, parser)
    if namespace.use_cpu and gpu is None:
        # Set these before the first call of torch.cuda.is_available(): after it, CUDA ignores CUDA_VISIBLE_DEVICES.
        # With a visible GPU, the optimizer step would ask for a CUDA stream and so start CUDA
        os.environ |= {"CUDA_VISIBLE_DEVICES": "", "REQUIRE_GPU": "0"}
    words = [word.split("=")[0] for word in arguments]
    given = {parser._option_string_actions[w].dest: w for w in words if w in parser._option_string_actions}
    check_empty_flags(namespace, given)
    # job.sh exports the origin of each variable, such as "TRAIN_SIZE=site EVAL_SIZE=submission"
    by_job = dict(word.split("=") for word in environment.get("KNOB_ORIGINS", "").split())
    settings = build_settings(
        vars(namespace),
        extra,
        names=variables | given,
        origins={flag: by_job.get(name, "variable") for flag, name in variables.items()} | dict.fromkeys(given, "flag"),
        warnings=warn_of_unread_variables(environment, by_job),
    )
    settings = complete(settings)
    check_settings(settings)
    settings = replace(settings, warnings=(*settings.warnings, *doubtful_choices(settings)))
    return resolve_precision(settings, torch.cuda.is_available() if gpu is None else gpu)


def environment_values(parser: Parser, environment: Mapping[str, str]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return flag -> value of its variable or its default, and flag -> variable for those that the environment sets."""
    for variable, remedy in UNREAD_VARIABLES.items():
        if environment.get(variable):
            raise WorkshopError(variable, "this variable is not read", remedy)
    actions = actions_by_flag(parser)
    values = dict(DEFAULTS)
    variables = {}
    for knob in KNOBS:
        text = environment.get(knob.variable, "").strip()
        if not text:
            continue
        variables[knob.flag] = knob.variable
        try:
            values[knob.flag] = parser._get_value(actions[knob.flag], text)
            parser._check_value(actions[knob.flag], values[knob.flag])
        except argparse.ArgumentError as error:
            raise WorkshopError(knob.variable, error.message, "correct or unset the variable") from None
    return values, variables


def reject_unknown(unknown: list[str], parser: Parser) -> None:
    """Raise WorkshopError (exit code 2) for the first unknown flag, with a hint."""
    flag = next((w for w in unknown if w.startswith("-")), unknown[0]).split("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    if name in FLAGS_OF_OTHER_PROGRAMS:
        raise WorkshopError(flag, "unknown flag", FLAGS_OF_OTHER_PROGRAMS[name])
    if named_as := next((knob.flag for knob in KNOBS if knob.variable.lower() == name), ""):
        raise WorkshopError(flag, "unknown flag", f"did you mean --{named_as}?")  # such as --grad_acc
    known = sorted({"steps", *actions_by_flag(parser)} - UNUSED_FLAGS.keys())
    raise WorkshopError(flag, "unknown flag", did_you_mean(name, known, "see --help", prefix="--"))


def check_empty_flags(namespace: argparse.Namespace, given: Mapping[str, str]) -> None:
    """Raise WorkshopError (exit code 2) for a flag with an empty value, usually from an unset shell variable.

    given: flag -> the word that the user typed for it.
    """
    for flag, word in given.items():
        if getattr(namespace, flag) in ("", [""]):
            raise WorkshopError(
                word, "its value is empty", "give one, or leave the flag out; is a shell variable unset?"
            )


def complete(settings: Settings) -> Settings:
    """Fill in the values that depend on another flag."""
    trainer = settings.trainer
    eval_batch_size = trainer.per_device_eval_batch_size
    checkpointing = trainer.activation_checkpointing
    trainer = replace(
        trainer,
        per_device_eval_batch_size=trainer.per_device_train_batch_size if eval_batch_size is None else eval_batch_size,
        activation_checkpointing=trainer.gradient_checkpointing if checkpointing is None else checkpointing,
        gradient_checkpointing=None,
        output_dir=os.path.expanduser(trainer.output_dir or "") or None,
    )
    return replace(settings, trainer=trainer)
