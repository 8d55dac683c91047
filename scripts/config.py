"""The command line of a training: flags and variables in, checked options out, and TrainingArguments from them.

Precedence: flag, then environment variable, then default. The knobs and their defaults are in knobs.py.
"""

import argparse
import difflib
import os
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import HfArgumentParser, TrainingArguments

from errors import ENVIRONMENT, OneLineErrors, WorkshopError
from json_files import is_unicode, parse_json, read_json
from knobs import (
    CUSTOM_GPT,
    CUSTOM_SIZES,
    KNOBS,
    OTHER_DEFAULTS,
    REMOVED_FLAGS,
    UNREAD_VARIABLES,
    UNUSED_FLAGS,
    DataArguments,
    ModelArguments,
)
from parallel import watchdog
from parallel.fsdp_config import parallelism, process_group_backend, trainer_config
from tracking import check_trackers

AT_LEAST_ONE = [
    *("train_size", "eval_size", "samples_per_gpu", "max_length", "em_f1_batch_size"),
    *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps", "ddp_timeout"),
    *CUSTOM_SIZES,
]
MORE_THAN_ZERO = ["num_train_epochs", "learning_rate"]
# The largest number of a flag, and of all others: what is above it ends in an overflow, or takes all memory
LARGEST: dict[str, float] = {
    "seed": 2**32 - 1,  # numpy's
    "data_seed": 2**32 - 1,
    "num_train_epochs": 10**6,
    "max_length": 2**20,
    "dataloader_num_workers": 1024,
    "label_smoothing_factor": 1,
    **dict.fromkeys(CUSTOM_SIZES, 10**6),
    **dict.fromkeys(("gpus", "nodes"), 10**5),
    "num_layers": 10**4,
}
LARGEST_INT = 2**31 - 1
LARGEST_FLOAT = 1e30
STEPS = {"logging_steps": "logging_strategy", "eval_steps": "eval_strategy", "save_steps": "save_strategy"}
# Values that name a file or folder, or a part of one
NAMES = [
    *("model_name", "tokenizer_name", "dataset", "eval_dataset", "output_dir", "run_name"),
    *("deepspeed", "fsdp_config", "accelerator_config", "resume_from_checkpoint"),
]
LONGEST_NAME = 255  # bytes, as most file systems have it
LONGEST_PATH = 2000  # bytes of Linux's 4096: something is to lie below it
# Values that are JSON objects
JSON_FLAGS = ["lr_scheduler_kwargs", "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs"]
LATEST = "latest"
DATACLASSES: list[Any] = [ModelArguments, DataArguments, TrainingArguments]


@dataclass
class Options:
    """The parsed command line. `values`: flag -> value; `names`: flag -> how the user gave it, for messages."""

    values: dict
    names: dict
    precision_note: str = ""
    deepspeed_config: dict | None = None
    fsdp_config: dict | None = None

    def settings(self) -> dict:
        """What defines the run: every knob, and each other flag that was given; no flag is a secret."""
        flags = {knob.flag for knob in KNOBS} | set(OTHER_DEFAULTS) | {"seed"} | set(self.names)
        flags.discard("local_rank")  # a launcher's, another one on each rank
        if self.values["model_name"] != CUSTOM_GPT:
            flags -= set(CUSTOM_SIZES)
        return {flag: self.values[flag] for flag in sorted(flags)}

    def error(self, flag: str, what: str, way_out: str) -> WorkshopError:
        """The error of a flag, by the name that the user gave it: the flag or its variable."""
        return WorkshopError(self.names.get(flag, f"--{flag}"), what, way_out)


class Parser(HfArgumentParser, OneLineErrors):
    pass


class HelpFormatter(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    pass


def build_parser(description: str) -> Parser:
    parser = Parser(DATACLASSES, description=description, formatter_class=HelpFormatter)
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
    defaults, names = environment_values(actions_by_flag(parser), environment)
    parser.set_defaults(**OTHER_DEFAULTS, **defaults)
    arguments = sys.argv[1:] if argv is None else argv
    for argument in arguments:
        check_unicode("command line", argument)
    namespace, unknown = parser.parse_known_args(arguments)
    if unknown:
        reject_unknown(unknown, parser)
    words = [word.split("=")[0] for word in arguments]
    given = {parser._option_string_actions[w].dest: w for w in words if w in parser._option_string_actions}
    options = Options(vars(namespace), names | given)
    check_names(options)
    check_values(options)
    check_custom_sizes(options)
    resolve_precision(options, torch.cuda.is_available() if gpu is None else gpu)
    return options


def environment_values(actions: dict, environment: Mapping[str, str]) -> tuple[dict, dict]:
    """Values of all knobs from the environment or their default, and the variables that were given."""
    for variable, way_out in UNREAD_VARIABLES.items():
        if variable in environment:
            raise WorkshopError(variable, "this variable is not read", way_out)
    values = {}
    names = {}
    for variable, flag, default in KNOBS:
        text = environment.get(variable, "").strip()
        values[flag] = default
        if not text:
            continue
        check_unicode(variable, text)
        names[flag] = variable
        action = actions[flag]
        try:
            values[flag] = action.type(text)
        except (ValueError, argparse.ArgumentTypeError):
            kind = "True or False" if action.nargs == "?" or flag in ("fp16", "bf16") else action.type.__name__
            raise WorkshopError(
                variable, f"{text!r} is not valid (expected {kind})", "correct or unset the variable"
            ) from None
        if action.choices and values[flag] not in action.choices:
            raise WorkshopError(variable, f"{text!r} is not one of {', '.join(action.choices)}", "choose one of these")
    return values, names


def reject_unknown(unknown: list[str], parser: Parser) -> None:
    flag = next((w for w in unknown if w.startswith("-")), unknown[0]).split("=")[0]
    if not flag.startswith("-"):
        raise WorkshopError(flag, "does not belong to any flag", "see --help")
    name = flag.lstrip("-").replace("-", "_")
    if name in REMOVED_FLAGS:
        raise WorkshopError(flag, "transformers 5 removed this flag", REMOVED_FLAGS[name])
    known = sorted({"steps", *actions_by_flag(parser)} - UNUSED_FLAGS.keys())
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.5)
    raise WorkshopError(flag, "unknown flag", f"did you mean --{near[0]}?" if near else "see --help")


def check_unicode(source: str, text: str) -> None:
    if not is_unicode(text):
        raise WorkshopError(source, f"{text!a:.60} is not UTF-8", "type it again")


def check_names(options: Options) -> None:
    """Lengths of names and paths; `~` of the output folder becomes the home directory."""
    values = options.values
    for flag in NAMES:
        name = (values[flag] or "").encode()
        if len(name) > LONGEST_PATH or any(len(part) > LONGEST_NAME for part in name.split(b"/")):
            way_out = f"a name has at most {LONGEST_NAME} bytes, a path {LONGEST_PATH}"
            raise options.error(flag, f"has {len(name)} bytes", way_out)
    if values["output_dir"]:
        values["output_dir"] = os.path.expanduser(values["output_dir"])
        if values["output_dir"].startswith("~"):
            raise options.error("output_dir", f"{values['output_dir']} is the home of nobody here", "correct the name")


def check_values(options: Options) -> None:
    values = options.values
    if values["per_device_eval_batch_size"] is None:
        values["per_device_eval_batch_size"] = values["per_device_train_batch_size"]
    if values["activation_checkpointing"] is None:
        values["activation_checkpointing"] = values["gradient_checkpointing"]  # the name that it had before
    values["gradient_checkpointing"] = None
    for flag in AT_LEAST_ONE:
        if values[flag] is not None and values[flag] < 1:
            raise options.error(flag, f"{values[flag]} is too small", "give a whole number of at least 1")
    for flag in MORE_THAN_ZERO:
        if not 0 < values[flag] < float("inf"):
            raise options.error(flag, f"{values[flag]} is out of range", "give a number above 0")
    if values["max_steps"] == 0 or values["max_steps"] < -1:
        raise options.error(
            "max_steps", f"{values['max_steps']} is no number of steps", "give at least 1, or leave it out"
        )
    for flag in options.names.keys() - {"local_rank"}:
        number = values[flag] if isinstance(values[flag], int | float) else 0
        smallest = -1 if flag == "max_steps" else 0
        largest = LARGEST.get(flag, LARGEST_INT if isinstance(number, int) else LARGEST_FLOAT)
        if not smallest <= number <= largest:
            raise options.error(flag, f"{number} is out of range", f"give a number of at least 0, at most {largest}")
    for flag, strategy in STEPS.items():
        if values[flag] == 0 and values[strategy] == "steps":
            way_out = "give at least 1, or a part of the training such as 0.1"
            raise options.error(flag, "0 is no number of steps", way_out)
    if values["loss"] == "chunked" and values["label_smoothing_factor"]:
        raise options.error("label_smoothing_factor", "needs the logits, and chunked has none", "use --loss full")
    if values["loss"] == "chunked" and values["use_liger_kernel"]:
        raise options.error("use_liger_kernel", "has a loss of its own, which would run instead", "use --loss full")
    if values["train_sampling_strategy"] == "batch_rebalance":
        what = "batch_rebalance has micro batches of no fixed size, which nothing here counts or compares"
        raise options.error("train_sampling_strategy", what, "use group_by_length")
    check_best_model(options)
    for flag in JSON_FLAGS:
        name = options.names.get(flag, flag)
        if values[flag] and not isinstance(parse_json(name, values[flag].encode(), "correct the JSON"), dict):
            raise options.error(flag, f"{values[flag]!r:.60} is no JSON object", """give one, such as '{"power": 2}'""")
    if values["accelerator_config"] and not values["accelerator_config"].startswith("{"):
        read_json(values["accelerator_config"], "give a JSON file")
    if not values["remove_unused_columns"]:
        raise options.error("remove_unused_columns", "the texts of the questions are no tensors", "leave it out")
    if values["deepspeed"] and values["fsdp"]:
        raise WorkshopError(
            "--deepspeed", "cannot be combined with --fsdp, both shard the model", "give one of the two"
        )
    if values["fsdp_config"] and not values["fsdp"]:
        raise options.error("fsdp_config", "does nothing without --fsdp", "add --fsdp")
    for flag, way_out in UNUSED_FLAGS.items():
        if flag in options.names:
            raise options.error(flag, "has no effect in this workshop", way_out)
    output_dir = Path(values["output_dir"] or "output")
    if any(path.exists() and not path.is_dir() for path in (output_dir, *output_dir.parents)):
        raise options.error("output_dir", f"{output_dir} is a file, or lies under one", "give a folder")


def check_best_model(options: Options) -> None:
    """The only metric of an evaluation in the training is its loss."""
    values = options.values
    metric = values["metric_for_best_model"]
    if metric not in (None, "loss", "eval_loss"):
        raise options.error("metric_for_best_model", f"{metric} is not measured in a training", "give loss")
    if values["save_strategy"] == "best" and metric is None:
        raise options.error("save_strategy", "best does not say of what", "add --metric_for_best_model loss")
    if values["save_strategy"] == "best" and values["eval_strategy"] == "no":
        raise options.error("save_strategy", "best needs evaluations", "leave out --eval_strategy no")


def check_custom_sizes(options: Options) -> None:
    values = options.values
    if values["model_name"] != CUSTOM_GPT:
        for flag in CUSTOM_SIZES:
            if flag in options.names:
                raise options.error(
                    flag, f"has no effect on {values['model_name']}", f"leave it out, or train {CUSTOM_GPT}"
                )
        return
    hidden = values["hidden_size"]
    heads = values["num_heads"]
    longest = values["seq_length"]
    if hidden % heads:
        raise options.error("num_heads", f"{heads} heads do not divide the hidden size {hidden}", "choose a divisor")
    if values["max_length"] > longest:
        what = f"{values['max_length']} is more than the {longest} positions of --seq_length"
        raise options.error("max_length", what, "lower it, or raise --seq_length")


def resolve_precision(options: Options, gpu: bool) -> None:
    """Replace unset fp16 and bf16 by what the hardware can do; weights stay fp32 masters in every case."""
    values = options.values
    gpu = gpu and not values["use_cpu"]
    if values["fp16"] and values["bf16"]:
        raise options.error("fp16", f"contradicts {options.names.get('bf16', '--bf16')}", "give one of the two")
    if values["fp16"] and not gpu:
        raise options.error(
            "fp16", "fp16 needs a CUDA GPU and there is none here", "use --bf16, or --fp16 False for fp32"
        )
    if values["fp16"] is None and values["bf16"] is None:
        values["fp16"] = gpu
        values["bf16"] = not gpu and cpu_has_bf16()
        options.precision_note = "default" if gpu else "default without a GPU, where fp16 does not run"
    values["fp16"] = bool(values["fp16"]) or (gpu and values["fp16"] is None and not values["bf16"])
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


def build_arguments(options: Options) -> tuple[ModelArguments, DataArguments, TrainingArguments]:
    """Construct the dataclasses. TrainingArguments joins the process group as a side effect."""
    values = dict(options.values)
    values["output_dir"] = values["output_dir"] or "output"
    if options.fsdp_config is not None:
        values["fsdp"] = True
        values["fsdp_config"] = trainer_config(options.fsdp_config)
        values["parallelism_config"] = parallelism(options.fsdp_config)
        # not by --ddp_backend, which takes one name; it must be known before TrainingArguments opens the group
        if backend := process_group_backend(options.fsdp_config, gpu=not values["use_cpu"]):
            if values["ddp_backend"]:
                raise options.error("ddp_backend", f"cpu_offload needs {backend}", "leave it out")
            values["ddp_backend"] = backend
    values["report_to"] = check_trackers(values["report_to"]) or "none"
    values["run_name"] = values["run_name"] or os.path.basename(os.getcwd())
    values["ddp_timeout"] = watchdog.start(values["ddp_timeout"])
    if values["tf32"] is None:
        values["tf32"] = False  # or --torch_compile would switch it on, and fp32 would not be fp32
    try:
        model_args, data_args, training_args = Parser(DATACLASSES).parse_dict(values)
    except (ValueError, OSError, TypeError, ArithmeticError, LookupError, ImportError) as error:
        raise WorkshopError("command line", str(error) or type(error).__name__, "see --help") from error
    except torch.distributed.DistError as error:
        raise WorkshopError(
            "process group", str(error), "check MASTER_ADDR and MASTER_PORT on every node", ENVIRONMENT
        ) from error
    watchdog.beat("the start, in one group")
    if training_args.n_gpu > 1:
        # transformers would fall back to nn.DataParallel; one process drives one GPU in this workshop
        print(f"plain python uses 1 of the {training_args.n_gpu} visible GPUs; start with scripts/launch.py to use all")
        training_args._n_gpu = 1
    return model_args, data_args, training_args
