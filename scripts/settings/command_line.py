"""The command line of a training: flags and variables in, checked options out.

Precedence: flag, then environment variable, then default. The knobs and their defaults are in config.py.
"""

import argparse
import contextlib
import os
import re
import shlex
import sys
import textwrap
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments

from config import CUSTOM_GPT, CUSTOM_SIZES, DEFAULTS, KNOBS, OTHER_DEFAULTS, DataArguments, ModelArguments
from shared.errors import ENVIRONMENT, OneLineErrors, WorkshopError, did_you_mean
from shared.paths import workshop_version
from shared.trackers import check_trackers

AT_LEAST_ONE = (
    *("train_size", "eval_size", "samples_per_gpu", "max_length", "em_f1_batch_size", "max_steps"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "ddp_timeout"),
    "tensor_parallel",
    *CUSTOM_SIZES,
)
# The three of steps may be a part of the training, such as 0.1
MORE_THAN_ZERO = ("num_train_epochs", "learning_rate", "logging_steps", "eval_steps", "save_steps")
LATEST = "latest"
ORIGINS = ("flag", "submission", "site", "experiment", "variable", "default", "unset")
WHOLE_WORDS: Any = {"break_long_words": False, "break_on_hyphens": False}
SHARDING = {"deepspeed", "fsdp", "fsdp_config", "parallelism_config"}

# Variables and flags that are not what they seem, each with what to do instead. Most of these variables stand in the
# workshop's original documents (docs/original-documents.md)
UNREAD_VARIABLES = {
    "PER_DEVICE_BATCH_SIZE": "use BATCH_SIZE",
    "GRAD_ACC_STEPS": "use GRAD_ACC",
    "LR": "use LEARNING_RATE",
    "LOG_DIR": "unset it; logs stand in the experiment's folder, below log/",
    "CONDA_SH_PATH": "unset it; the environment stands in site_setup of the site file",
    "CONDA_ENV": "unset it; the environment stands in site_setup of the site file",
}
# Names that shells and scripts also set for themselves, so they only cause a warning. job.sh exports every variable of
# a .slurm file
WARNED_VARIABLES = {
    "BATCHSIZE": "the knob is BATCH_SIZE",
    "DEEPSPEED": "the flag is --deepspeed",
    "EPOCHS": "the knob is NUM_EPOCHS",
    "FSDP": "the flag is --fsdp",
    "MAX_STEPS": "the flag is --max_steps",
    "MODEL": "the knob is MODEL_NAME",
    "RUN_NAME": "the knob is EXPERIMENT_NAME",
    "SEED": "the flag is --seed",
}
# The upper-case name of a knob's flag, where its variable is shorter: NUM_TRAIN_EPOCHS for NUM_EPOCHS
UNREAD_VARIABLES |= {
    knob.flag.upper(): f"use {knob.variable}"
    for knob in KNOBS
    if knob.flag.upper() not in (knob.variable, *WARNED_VARIABLES)
}
# ps shows a flag to everybody on the node, and the run record keeps it
SECRET = "set the variable HF_TOKEN, or log in with hf auth login; a flag is no place for a secret"
# Flags of transformers 4 that version 5 removed and tutorials still use, with what takes their place
REMOVED_FLAGS = {
    "adafactor": "use --optim adafactor",
    "evaluation_strategy": "use --eval_strategy",
    "fsdp_min_num_params": 'set "min_num_params" in the --fsdp_config file',
    "fsdp_transformer_layer_cls_to_wrap": 'set "transformer_layer_cls_to_wrap" in the --fsdp_config file',
    "group_by_length": "use --train_sampling_strategy group_by_length",
    "half_precision_backend": "leave it out, there is one backend",
    "logging_dir": "set the variable TENSORBOARD_LOGGING_DIR",
    "no_cuda": "use --use_cpu",
    "overwrite_output_dir": "use a new --output_dir, or --resume_from_checkpoint to go on",
    "per_gpu_eval_batch_size": "use --per_device_eval_batch_size",
    "per_gpu_train_batch_size": "use --per_device_train_batch_size",
    "push_to_hub_model_id": "upload the saved folder afterwards",
    "push_to_hub_token": SECRET,
    "save_safetensors": "leave it out, safetensors is the only format",
    "use_mps_device": "leave it out, the device is found by itself",
    "warmup_ratio": "use --warmup_steps with a fraction below 1",
}
# Flags that other training programs and launchers have
FLAGS_OF_OTHER_PROGRAMS = {
    "epochs": "use --num_train_epochs",
    "lr": "use --learning_rate",
    "max_seq_length": "use --max_length",
    "mixed_precision": "use --fp16, --bf16, or --fp16 False for fp32",
    "model": "use --model_name",
    "nproc_per_node": "torchrun's flags come before the script: torchrun --nproc_per_node=2 scripts/train.py",
    "num_gpus": "start one process per GPU: torchrun --nproc_per_node=2 scripts/train.py",
    "precision": "use --fp16, --bf16, or --fp16 False for fp32",
    "resume": "use --resume_from_checkpoint",
}
# Flags of TrainingArguments that would be accepted here and then have no effect
UNUSED_FLAGS = {
    "do_eval": "use --eval_strategy",
    "do_predict": "use scripts/evaluate.py",
    "do_train": "leave it out, training is what train.py does",
    "hub_model_id": "upload the saved folder afterwards",
    "hub_token": SECRET,
    "push_to_hub": "upload the saved folder afterwards",
}


@dataclass
class Options:
    """The parsed command line.

    values: flag -> value. names: flag -> how the user gave it, the flag or its variable. origins: flag -> who gave it:
    flag, submission, site, experiment; or variable, where no job.sh told more. What nobody gave has its default.
    """

    values: dict
    names: dict
    origins: dict = field(default_factory=dict)
    precision_note: str = ""
    warnings: list[str] = field(default_factory=list)
    deepspeed_config: dict | None = None
    fsdp_config: dict | None = None

    def settings(self) -> dict:
        """What defines the run: every knob, and each other flag that was given; no flag is a secret."""
        flags = {knob.flag for knob in KNOBS} | set(OTHER_DEFAULTS) | {"seed"} | set(self.names)
        if self.values["model_name"] != CUSTOM_GPT:
            flags -= set(CUSTOM_SIZES)
        return {flag: self.values[flag] for flag in sorted(flags)}

    def knob_lines(self) -> list[str]:
        """All knobs with their values, grouped by who gave them, highest precedence first; then the warnings."""
        shown: dict[str, list[str]] = {origin: [] for origin in ORIGINS}
        for knob in KNOBS:
            if knob.flag in CUSTOM_SIZES and self.values["model_name"] != CUSTOM_GPT:
                continue
            value = self.values[knob.flag]
            number = f"{value:g}" if isinstance(value, float) else str(value)
            text = knob.variable if value is None else f"{knob.variable}={shlex.quote(number)}"
            shown["unset" if value is None else self.origins.get(knob.flag, "default")].append(text)
        lines = ["knobs, by where they come from:"]
        for origin, texts in shown.items():
            if texts:
                start, next_line = f"  {origin:12}", " " * 14
                text = " ".join(texts)
                lines.append(textwrap.fill(text, 120, initial_indent=start, subsequent_indent=next_line, **WHOLE_WORDS))
        return lines + [f"warning: {text}" for text in self.warnings]

    def error(self, flag: str, what: str, way_out: str) -> WorkshopError:
        """The error of a flag, by the name that the user gave it: the flag or its variable."""
        return WorkshopError(self.names.get(flag, f"--{flag}"), what, way_out)


class Parser(HfArgumentParser, OneLineErrors):
    def add_argument(self, *names, variable: str = "", **details):
        """HfArgumentParser hands on what config.py says of a field, its variable too."""
        return super().add_argument(*names, **details)


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def build_parser(description: str) -> Parser:
    kinds: Any = (ModelArguments, DataArguments, TrainingArguments)
    parser = Parser(kinds, description=description, formatter_class=HelpFormatter)
    parser.add_argument("--version", action="version", version=workshop_version())
    actions = actions_by_flag(parser)
    actions["max_steps"].option_strings.append("--steps")
    parser._option_string_actions["--steps"] = actions["max_steps"]
    resume = actions["resume_from_checkpoint"]
    resume.nargs = "?"
    resume.const = LATEST
    resume.help = "Go on from this run folder or checkpoint; without a value, from the latest complete checkpoint."
    for knob in KNOBS:
        actions[knob.flag].help = f"{actions[knob.flag].help} Variable {knob.variable}."
    return parser


def actions_by_flag(parser: Parser) -> dict:
    # the first of each, as --no_em_f1 is a second one for em_f1
    return {action.dest: action for action in reversed(parser._actions)}


def parse_command_line(
    description: str,
    argv: list[str] | None = None,
    extra: dict | None = None,
    gpu: bool | None = None,
    environment: Mapping[str, str] = os.environ,
) -> Options:
    """Read flags and variables; check everything that needs neither a process group nor the data.

    extra: flags of one script alone, name -> add_argument's arguments. gpu: whether the training will have one,
    by default whether there is one here. environment: where the variables of the knobs are looked up.
    Raises WorkshopError (exit code 2) for a user's mistake.
    """
    parser = build_parser(description)
    for flag, details in (extra or {}).items():
        parser.add_argument(f"--{flag}", **details)
    defaults, names = environment_values(parser, environment)
    parser.set_defaults(**OTHER_DEFAULTS, **defaults)
    arguments = sys.argv[1:] if argv is None else argv
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown(unknown, parser)
    if namespace.use_cpu and gpu is None:
        # The first torch.cuda.is_available() starts CUDA, which never reads the variable again. Without it, each
        # optimizer step would ask for a CUDA stream, and start CUDA for that
        os.environ.update(CUDA_VISIBLE_DEVICES="", REQUIRE_GPU="0")
    words = [word.split("=")[0] for word in arguments]
    given = {parser._option_string_actions[w].dest: w for w in words if w in parser._option_string_actions}
    by_job = dict(word.split("=") for word in environment.get("KNOB_ORIGINS", "").split())  # job.sh: VARIABLE=site ...
    origins = {flag: by_job.get(variable, "variable") for flag, variable in names.items()} | dict.fromkeys(
        given, "flag"
    )
    options = Options(vars(namespace), names | given, origins)
    options.warnings = [
        f"{name}: this variable is not read; {way_out}"
        for name, way_out in WARNED_VARIABLES.items()
        if environment.get(name)
    ]
    check_empty_flags(options.values, given)
    complete(options.values)
    check_numbers(options)
    check_combinations(options)
    check_beside_tensor_parallel(options)
    check_custom_sizes(options)
    resolve_precision(options, torch.cuda.is_available() if gpu is None else gpu)
    return options


def environment_values(parser: Parser, environment: Mapping[str, str]) -> tuple[dict, dict]:
    """Values of all knobs from the environment or their default, and the variables that were given."""
    for variable, way_out in UNREAD_VARIABLES.items():
        if environment.get(variable):
            raise WorkshopError(variable, "this variable is not read", way_out)
    actions = actions_by_flag(parser)
    values = dict(DEFAULTS)
    names = {}
    for variable, flag, _ in KNOBS:
        text = environment.get(variable, "").strip()
        if not text:
            continue
        names[flag] = variable
        try:
            values[flag] = parser._get_value(actions[flag], text)
            parser._check_value(actions[flag], values[flag])
        except argparse.ArgumentError as error:
            raise WorkshopError(variable, error.message, "correct or unset the variable") from None
    return values, names


def reject_unknown(unknown: list[str], parser: Parser) -> None:
    flag = next((w for w in unknown if w.startswith("-")), unknown[0]).split("=")[0]
    name = flag.lstrip("-").replace("-", "_")
    if name in REMOVED_FLAGS:
        raise WorkshopError(flag, "transformers 5 removed this flag", REMOVED_FLAGS[name])
    if name in FLAGS_OF_OTHER_PROGRAMS:
        raise WorkshopError(flag, "unknown flag", FLAGS_OF_OTHER_PROGRAMS[name])
    if named_as := next((knob.flag for knob in KNOBS if knob.variable.lower() == name), ""):
        raise WorkshopError(flag, "unknown flag", f"did you mean --{named_as}?")  # --batch_size, --grad_acc
    known = sorted({"steps", *actions_by_flag(parser)} - UNUSED_FLAGS.keys())
    raise WorkshopError(flag, "unknown flag", did_you_mean(name, known, "see --help", prefix="--"))


def check_empty_flags(values: dict, given: dict[str, str]) -> None:
    """Raises WorkshopError (exit code 2) for a flag with an empty value, which an unset shell variable leaves.

    given: flag -> the word that the user typed for it.
    """
    for flag, word in given.items():
        if values[flag] in ("", [""]):
            raise WorkshopError(
                word, "its value is empty", "give one, or leave the flag out; is a shell variable unset?"
            )


def complete(values: dict) -> None:
    """Fill in what follows from another flag."""
    if values["per_device_eval_batch_size"] is None:
        values["per_device_eval_batch_size"] = values["per_device_train_batch_size"]
    if values["activation_checkpointing"] is None:
        values["activation_checkpointing"] = values["gradient_checkpointing"]  # the name that it had before
    values["gradient_checkpointing"] = None
    values["output_dir"] = os.path.expanduser(values["output_dir"] or "") or None


def check_numbers(options: Options) -> None:
    for flag in options.names:
        number = options.values[flag]
        no_limit = flag == "max_steps" and number == -1
        if flag in AT_LEAST_ONE and number < 1 and not no_limit:
            raise options.error(flag, f"{number} is too small", "give a whole number of at least 1")
        if flag in MORE_THAN_ZERO and not 0 < number < float("inf"):
            raise options.error(flag, f"{number} is out of range", "give a number above 0")


def check_combinations(options: Options) -> None:
    """Raises WorkshopError (exit code 2) for flags that contradict each other, or would have no effect."""
    values = options.values
    for flag in sorted(options.names.keys() & UNUSED_FLAGS.keys()):
        raise options.error(flag, "has no effect in this workshop", UNUSED_FLAGS[flag])
    if values["deepspeed"] and values["fsdp"]:
        raise options.error("deepspeed", "cannot be combined with --fsdp, both shard the model", "give one of the two")
    if values["fsdp_config"] and not values["fsdp"]:
        raise options.error("fsdp_config", "does nothing without --fsdp", "add --fsdp")
    if values["loss"] == "chunked" and values["label_smoothing_factor"]:
        raise options.error("label_smoothing_factor", "needs the logits, and chunked has none", "use --loss full")
    if values["loss"] == "chunked" and values["use_liger_kernel"]:
        raise options.error("use_liger_kernel", "has a loss of its own, which would run instead", "use --loss full")
    if values["optim"] == "adafactor" and (values["fsdp"] or values["tensor_parallel"] > 1):
        what = "adafactor cannot step parameters that are sharded"
        raise options.error("optim", what, "use adamw_torch_fused (the default), adamw_torch, sgd or rmsprop")
    # Both modes compare kernels, and inductor files the times under torch.get_float32_matmul_precision() (PyTorch 2.13,
    # select_algorithm.py and codecache.py). That raises once torch.backends.fp32_precision is "tf32", as --tf32 sets it
    if values["tf32"] and values["torch_compile_mode"] in ("max-autotune", "max-autotune-no-cudagraphs"):
        what = f"cannot be combined with {values['torch_compile_mode']}, which PyTorch 2.13 then cannot compile"
        raise options.error("tf32", what, "leave it out, or use another --torch_compile_mode")


def check_beside_tensor_parallel(options: Options) -> None:
    """Raises WorkshopError (exit code 2) for what a model that is cut into columns and rows cannot do."""
    values = options.values
    if values["tensor_parallel"] == 1:
        return
    if values["deepspeed"]:
        way_out = "use --fsdp for the ranks beside a tensor group"
        raise options.error("tensor_parallel", "cannot be combined with --deepspeed", way_out)
    if values["loss"] == "chunked":
        raise options.error("loss", "chunked needs a head in one piece, --tensor_parallel cuts it", "use --loss full")


def check_custom_sizes(options: Options) -> None:
    values = options.values
    if values["model_name"] != CUSTOM_GPT:
        for flag in sorted(options.names.keys() & set(CUSTOM_SIZES)):
            way_out = f"leave it out, or train {CUSTOM_GPT}"
            raise options.error(flag, f"has no effect on {values['model_name']}", way_out)
        return
    heads = values["num_heads"]
    hidden = values["hidden_size"]
    if hidden % heads:
        raise options.error("num_heads", f"{heads} heads do not divide the hidden size {hidden}", "choose a divisor")
    if values["max_length"] > values["seq_length"]:
        what = f"{values['max_length']} is more than the {values['seq_length']} positions of --seq_length"
        raise options.error("max_length", what, "lower it, or raise --seq_length")


def resolve_precision(options: Options, gpu: bool) -> None:
    """Replace unset fp16 and bf16 by what the hardware can do; weights stay fp32 masters in every case."""
    values = options.values
    gpu = gpu and not values["use_cpu"]
    if values["fp16"] and values["bf16"]:
        raise options.error("fp16", f"contradicts {options.names.get('bf16', '--bf16')}", "give one of the two")
    if values["fp16"] and not gpu:
        way_out = "use --bf16, or --fp16 False for fp32"
        raise options.error("fp16", "fp16 needs a CUDA GPU and there is none here", way_out)
    if values["fp16"] is None and not values["bf16"]:
        values["fp16"] = gpu
        values["bf16"] = values["bf16"] is None and not gpu and cpu_has_bf16()
        options.precision_note = "default" if gpu else "default without a GPU, where fp16 does not run"
    values["fp16"] = bool(values["fp16"])
    values["bf16"] = bool(values["bf16"])
    here = gpu and torch.cuda.is_available()
    if values["bf16"] and here and not torch.cuda.is_bf16_supported(including_emulation=False):
        raise options.error("bf16", "this GPU has no bf16", "use --fp16")
    if not gpu:
        values["use_cpu"] = True


def cpu_has_bf16() -> bool:
    """Whether the CPU computes in bf16 itself (AVX512-BF16, AMX or Arm BF16), instead of emulating it."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return re.search(r"^(flags|Features)\s*:.*\b(avx512_bf16|amx_bf16|bf16)\b", flags, re.MULTILINE) is not None


def precision_name(values: dict) -> str:
    if values["fp16"]:
        return "fp16"
    return "bf16" if values["bf16"] else "fp32"


def compute_dtype(values: dict) -> torch.dtype:
    return {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}[precision_name(values)]


def own_arguments(options: Options) -> tuple[ModelArguments, DataArguments]:
    """The flags that transformers does not know."""
    parts = [
        {part.name: options.values[part.name] for part in fields(kind)} for kind in (ModelArguments, DataArguments)
    ]
    return ModelArguments(**parts[0]), DataArguments(**parts[1])


def trainer_flags(options: Options) -> dict:
    """All values for TrainingArguments but those that turn on ZeRO or FSDP, which train.py adds."""
    known = {field.name for field in fields(TrainingArguments) if field.init}
    flags = {name: value for name, value in options.values.items() if name in known - SHARDING}
    flags["output_dir"] = options.values["output_dir"] or "output"
    flags["report_to"] = check_trackers(options.values["report_to"]) or "none"
    flags["run_name"] = options.values["run_name"] or os.path.basename(os.getcwd())
    flags["tf32"] = bool(options.values["tf32"])  # unset, --torch_compile would switch it on, and fp32 were not fp32
    # offloaded gradients lie on the CPU when their norm is summed over the ranks, and NCCL knows no CPU tensors ("No
    # backend type associated with device type cpu"); TrainingArguments opens the group, and its flag takes one name
    if options.fsdp_config and options.fsdp_config.get("cpu_offload"):
        flags["ddp_backend"] = "cuda:nccl,cpu:gloo"
    return flags


@contextlib.contextmanager
def argument_errors() -> Iterator[None]:
    """One line of what TrainingArguments refuses. Raises WorkshopError."""
    try:
        yield
    except (ValueError, OSError, ImportError) as error:
        raise WorkshopError("command line", str(error), "see --help") from error
    except torch.distributed.DistError as error:
        way_out = "check MASTER_ADDR and MASTER_PORT on every node"
        raise WorkshopError("process group", str(error), way_out, ENVIRONMENT) from error
