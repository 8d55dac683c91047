"""Flags and variables: their precedence, the errors for mistakes, and the precision that results from them."""

import argparse
import dataclasses
import importlib.util
import re

import pytest
from transformers import TrainingArguments

from config import FLAGS, KNOBS, TRAINER_FLAGS, DataArguments, ModelArguments, facts, knobs_of, number_or_all
from estimate.flags import EstimateArguments
from helpers import EXPERIMENTS
from settings import precision
from settings.command_line import actions_by_flag, build_parser, parse_command_line
from settings.hints import UNUSED_FLAGS, warn_of_unread_variables
from settings.settings import Settings, TrainerArguments
from settings.trainer_flags import trainer_flags
from shared.paths import workshop_version
from shared.tracker_setup import check_trackers


def parse(*argv: str) -> Settings:
    return parse_command_line("Purpose.", list(argv))


# flag -> variable, default, (text of the variable, its value), (text of the flag, its value).
# KNOBS and the table of docs/knobs.md list all variables with their flags
PRECEDENCE = {
    "train_size": ("TRAIN_SIZE", None, ("7", 7), ("8", 8)),
    "eval_size": ("EVAL_SIZE", None, ("all", "all"), ("8", 8)),
    "samples_per_gpu": ("SAMPLES_PER_GPU", None, ("7", 7), ("8", 8)),
    "fp16": ("FP16", True, ("False", False), ("True", True)),
    "num_train_epochs": ("NUM_EPOCHS", 3, ("7", 7), ("0.5", 0.5)),
    "em_f1": ("EM_F1", None, ("no", False), ("yes", True)),
}


@pytest.mark.parametrize("flag", PRECEDENCE)
def test_flag_beats_variable_beats_default(flag, gpu, monkeypatch):
    variable, default, (text, by_variable), (typed, by_flag) = PRECEDENCE[flag]
    monkeypatch.setenv(variable, " ")
    assert parse().flat()[flag] == default, "an empty variable counts as unset"
    monkeypatch.setenv(variable, text)
    assert parse().flat()[flag] == by_variable
    assert parse(f"--{flag}", typed).flat()[flag] == by_flag
    assert parse(f"--{flag.replace('_', '-')}={typed}").flat()[flag] == by_flag


def test_the_version_is_shown(capsys):
    with pytest.raises(SystemExit) as ended:
        parse("--version")
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"{workshop_version()}\n"


@pytest.mark.promise("each knob is shown with its source")
def test_each_knob_is_shown_with_where_it_comes_from(monkeypatch):
    """job.sh passes the origin of each variable. A variable without an origin is shown as `variable`."""
    for variable, value in {"TRAIN_SIZE": "7", "EVAL_SIZE": "8", "LABELS": "answer", "DATASET": "my data.json"}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("KNOB_ORIGINS", "TRAIN_SIZE=submission EVAL_SIZE=site LABELS=experiment PATH=site")
    settings = parse("--eval-size=9")
    assert settings.origins == {
        "train_size": "submission",
        "eval_size": "flag",
        "labels": "experiment",
        "dataset": "variable",
    }
    lines = settings.knob_lines()
    assert lines[:5] == [
        "knobs, by where they come from:",
        "  flag        EVAL_SIZE=9",
        "  submission  TRAIN_SIZE=7",
        "  experiment  LABELS=answer",
        "  variable    DATASET='my data.json'",
    ]
    assert lines[5].startswith("  default     MODEL_NAME=bigscience/bloom-560m FROM_SCRATCH=False LOSS=full")
    assert lines[-2].startswith("  unset       TOKENIZER_NAME ATTENTION EVAL_DATASET")
    assert lines[-1] == "the trained model will be saved in output/<job id>"
    assert "VOCAB_SIZE" not in "".join(lines)


def test_a_variable_that_another_program_may_need_is_a_warning(monkeypatch):
    """EPOCHS may be a mistake for NUM_EPOCHS, but the user's own script may also need it."""
    monkeypatch.setenv("EPOCHS", "3")
    monkeypatch.setenv("SEED", "")
    lines = parse().knob_lines()
    warning = "warning: EPOCHS: this variable is not read; the knob is NUM_EPOCHS"
    assert [line for line in lines if line.startswith("warning")] == [warning]


def test_a_variable_that_is_almost_a_knob_is_a_warning_and_those_of_the_workshop_are_not():
    """tests/commands/test_dry_run.py sets such a variable in env_vars.sh."""
    mistakes = {"TRAINSIZE": "TRAIN_SIZE", "NUM_EPOCH": "NUM_EPOCHS", "LERNING_RATE": "LEARNING_RATE", "FP_16": "FP16"}
    lines = [f"{name}: this variable is not read; did you mean {knob}?" for name, knob in mistakes.items()]
    found = warn_of_unread_variables({}, dict.fromkeys(mistakes, "experiment"))
    assert [*found] == lines, "also if its value is empty"
    assert warn_of_unread_variables({}, dict.fromkeys(mistakes, "submission")) == ()
    texts = [path.read_text() for path in EXPERIMENTS.rglob("*") if path.suffix in (".sh", ".slurm")]
    names = set(re.findall(r"\b([A-Z][A-Z0-9_]+)(?=:?=)", "".join(texts)))
    assert {"SITE_SAMPLES_PER_GPU", "JOIN_TIMEOUT", "NCCL_ALGO", "TRAIN_SIZE"} <= names
    assert warn_of_unread_variables({}, dict.fromkeys([*names, "NUM_THREADS", "LESS"], "site")) == ()


def test_every_variable_is_named_in_the_help(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Purpose.")
    assert [knob.variable for knob in KNOBS if f"Variable {knob.variable}." not in text] == []


def test_values_that_follow_from_other_flags():
    assert parse("--steps", "7").flat()["max_steps"] == 7
    assert parse("--per_device_train_batch_size", "7").flat()["per_device_eval_batch_size"] == 7
    given = parse("--per_device_train_batch_size", "7", "--per-device-eval-batch-size", "2")
    assert given.flat()["per_device_eval_batch_size"] == 2


def test_typed_settings_hold_each_flag_of_the_command_line_once():
    """A resumed run compares the settings of its checkpoint by these names, also if an earlier version saved it."""
    flags = {flag for flag, action in actions_by_flag(build_parser("")).items() if action.default != argparse.SUPPRESS}
    assert parse().flat().keys() == flags
    rows = [*knobs_of(ModelArguments), *knobs_of(DataArguments), *(knob.flag for knob in TRAINER_FLAGS)]
    assert sorted(rows) == sorted(FLAGS), "of two rows of a flag, only the last one counts"
    trainer_fields = {each.name for each in dataclasses.fields(TrainerArguments)} | {
        each.flag for each in TRAINER_FLAGS
    }
    assert trainer_fields <= {each.name for each in dataclasses.fields(TrainingArguments)}


MISTAKES = {
    # unknown
    "--learning-rte=1": "--learning-rte: unknown flag; did you mean --learning_rate?",
    "--zzz": "--zzz: unknown flag; see --help",
    "--num_train": "--num_train: unknown flag; did you mean --num_train_epochs?",
    "--batch-size 8": "--batch-size: unknown flag; did you mean --per_device_train_batch_size?",
    "--warmup-ratio=1": "--warmup-ratio: unknown flag; use --warmup_steps",
    "--epochs 3": "--epochs: unknown flag; use --num_train_epochs",
    "--lr 1e-4": "--lr: unknown flag; use --learning_rate",
    "--resume": "--resume: unknown flag; use --resume_from_checkpoint",
    "--num-gpus=2": "--num-gpus: unknown flag; start one process per GPU: torchrun --nproc_per_node=2 ",
    "--precision bf16": "--precision: unknown flag; use --fp16, --bf16, or --fp16 False for fp32",
    # malformed
    "--show -1": "--show: -1 is out of range; give a number of at least 0",
    "--train_size x": "--train_size: invalid value: 'x', expected a whole number or all; see --help",
    "--train_size": "--train_size: expected one argument",
    "--padding maximum": "--padding: invalid choice: 'maximum' (choose from 'max_length', 'longest', 'none')",
    "--padding none --labels all": "--padding: none cannot be combined with --tensor_parallel or --labels all; "
    "use --padding longest",
    "SAMPLING=group_by_length": "SAMPLING: this variable is not read; "
    "unset it; questions are always shuffled, and PADDING=none leaves out all padding",
    "--train_sampling_strategy group_by_length": "--train_sampling_strategy: group_by_length would group differently "
    "after a resume and on other numbers of ranks; use --padding none --attention sdpa, which leaves out all padding",
    "--eval_strategy often": "--eval_strategy: invalid choice: 'often'",
    "--train-size -3": "--train-size: -3 is out of range; give a number of at least 1",
    "WEIGHT_DECAY=nan": "WEIGHT_DECAY: nan is out of range; give a number of at least 0",
    "--adam_beta1 4": "--adam_beta1: 4.0 is out of range; give a number of at least 0 and below 1",
    "--seed 4294967296": "--seed: 4294967296 is out of range; give a number of at least 0 and below 4294967296",
    "--learning_rate nan": "--learning_rate: nan is out of range; give a number above 0",
    "TRAIN_SIZE=many": "TRAIN_SIZE: invalid value: 'many', expected a whole number or all; correct or unset",
    "FP16=maybe": "FP16: Truthy value expected: got maybe",
    "PER_DEVICE_BATCH_SIZE=4": "PER_DEVICE_BATCH_SIZE: this variable is not read; use BATCH_SIZE",
    "NUM_TRAIN_EPOCHS=1": "NUM_TRAIN_EPOCHS: this variable is not read; use NUM_EPOCHS",
    "GRADIENT_ACCUMULATION_STEPS=1": "GRADIENT_ACCUMULATION_STEPS: this variable is not read; use GRAD_ACC",
    # empty, because a shell variable after the flag is unset
    "--deepspeed=": "--deepspeed: its value is empty; give one, or leave the flag out",
    "--fsdp=": "--fsdp: its value is empty; ",
    "--fsdp --fsdp-config=": "--fsdp-config: its value is empty; ",
    "--dataset=": "--dataset: its value is empty; ",
    # contradictory, or without effect
    "--deepspeed a.json --fsdp": "--deepspeed: cannot be combined with --fsdp, because both shard the ",
    "--fsdp_config a.json": "--fsdp_config: has no effect without --fsdp; add --fsdp",
    "--bf16 --fp16": "--fp16: contradicts --bf16; give one of the two",
    "FP16=True --bf16": "FP16: contradicts --bf16; give one of the two",
    "--do_train": "--do_train: has no effect in this workshop; leave it out, training is what train.py does",
    "--loss chunked --label_smoothing_factor 0.1": "--label_smoothing_factor: needs the logits, which --loss chunked",
    "--loss chunked --use_liger_kernel": "--use_liger_kernel: has a loss of its own, which would replace --loss",
    "--lora_rank 8 --tensor_parallel 2": "--lora_rank: cannot be combined with --tensor_parallel, which cuts the "
    "layers that get adapters;",
    "--save_merged False": "--save_merged: False has no effect without LoRA",
    "--save_merged False --lora_rank 8 --from_scratch": "--save_merged: False would save nothing, because no adapters",
    "--tf32 True --torch_compile_mode max-autotune": "--tf32: cannot be combined with max-autotune",
    "--fsdp --optim adafactor": "--optim: adafactor cannot update shards; use one of adamw_torch_fused, ",
    "--model_name custom-gpt --num_heads 3": "--num_heads: 3 heads do not divide the hidden size 2048; choose a ",
    "--model_name tiny-bloom --num_layers 3": "--num_layers: has no effect on tiny-bloom; leave it out, or train ",
    "--model_name custom-gpt --seq_length 3": "--max_length: 512 is more than the 3 positions of --seq_length; lower",
    # secrets, which `ps` would show
    "--hub_token=hf_canary": "--hub_token: ",
    "--hub_tokn hf_canary": "--hub_tokn: ",
}


@pytest.mark.parametrize("words", MISTAKES)
def test_a_mistake_is_one_line_with_a_remedy(words, gpu, monkeypatch, refusal):
    flags = words.split()
    if not words.startswith("-"):
        monkeypatch.setenv(*flags.pop(0).split("="))
    line = refusal(parse, *flags)
    assert line.startswith(f"error: {MISTAKES[words]}")
    assert "hf_canary" not in line


ACTIONS = actions_by_flag(build_parser("", EstimateArguments))
NUMBERS = [flag for flag, action in ACTIONS.items() if action.type in (int, float, number_or_all)]


def estimate(*argv: str) -> Settings:
    return parse_command_line("", list(argv), EstimateArguments)


@pytest.mark.parametrize("flag", NUMBERS)
def test_no_number_is_negative_infinite_or_huge(flag, refusal, monkeypatch):
    """The limits of a flag in config.py are the only exceptions."""
    knob = knobs_of(EstimateArguments).get(flag) or facts(flag)
    for number in ("nan", "inf", "1e300", "-1e300", "9" * 400, "-3"):
        if number != "-3" or knob.limits.at_least > -3:
            assert refusal(estimate, f"--{flag}={number}").startswith(f"error: --{flag}: ")
            if knob.variable:
                monkeypatch.setenv(knob.variable, number)
                assert refusal(estimate).startswith(f"error: {knob.variable}: ")
                monkeypatch.delenv(knob.variable)


def test_numbers_that_mean_no_limit_or_none_are_legal():
    flags = "--max_steps=-1 --local_rank=-1 --save_total_limit=-1 --max_grad_norm=0 --show=0 --save_steps=0.1"
    assert trainer_flags(parse(*flags.split()))["save_total_limit"] == 0


def test_a_tracker_that_is_unknown_or_missing_says_what_to_do(monkeypatch, refusal):
    assert "choose one of wandb, tensorboard, trackio, none" in refusal(check_trackers, "wandbb")
    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    line = refusal(check_trackers, "wandb")
    assert line == "error: --report_to: wandb is not installed; pip install wandb"


def test_each_flag_that_takes_a_secret_is_refused():
    flags = set(actions_by_flag(build_parser("")))
    secrets = {flag for flag in flags if re.search("token|key|secret|password", flag)}
    # these flags are numbers of tokens, or names of tokenizers
    harmless = {flag for flag in secrets if re.search("tokens|tokenizer", flag)}
    assert secrets - harmless <= UNUSED_FLAGS.keys()


# Precision


def chosen_precision(words: str) -> str:
    return parse(*words.split()).precision


PRECISIONS = {"": "fp16", "--fp16": "fp16", "--bf16 False": "fp16", "--bf16": "bf16", "--fp16 False": "fp32"}


@pytest.mark.parametrize("words", PRECISIONS)
def test_precision_on_a_gpu(words, gpu):
    assert chosen_precision(words) == PRECISIONS[words]


def test_bf16_on_a_gpu_without_it_is_refused(gpu, monkeypatch, refusal):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: False)
    assert refusal(parse, "--bf16") == "error: --bf16: this GPU has no bf16; use --fp16"


@pytest.mark.parametrize(("native", "default"), [(True, "bf16"), (False, "fp32")])
def test_precision_without_a_gpu_follows_the_cpu_and_is_announced(native, default, monkeypatch):
    monkeypatch.setattr(precision, "cpu_has_bf16", lambda: native)
    assert chosen_precision("") == default
    assert parse().precision_note == "default without a GPU, where fp16 does not run"
    assert parse("--fp16", "False").precision_note == ""
    assert [chosen_precision(words) for words in ("--bf16", "--fp16 False", "--bf16 False")] == ["bf16", "fp32", "fp32"]


def test_fp16_without_a_gpu_is_refused_and_names_its_origin(monkeypatch, refusal):
    line = "fp16 needs a CUDA GPU, and this machine has none; use --bf16, or --fp16 False for fp32"
    assert refusal(parse, "--fp16") == f"error: --fp16: {line}"
    monkeypatch.setenv("FP16", "True")
    assert refusal(parse) == f"error: FP16: {line}"
