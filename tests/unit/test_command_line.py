"""What the user types, sets and mistypes: flags, variables, their precedence and the precision that follows."""

import dataclasses
import json
import re

import pytest
import torch
from transformers import TrainingArguments

import config
from knobs import CUSTOM_SIZES, KNOBS, REMOVED_FLAGS, UNUSED_FLAGS

# flag -> default, then text of the variable and the value it gives, then text of the flag and the value it gives
VALUES = {
    "model_name": ("bigscience/bloom-560m", ("a/b", "a/b"), ("c", "c")),
    "from_scratch": (False, ("True", True), ("False", False)),
    "dataset": ("squad", ("a.json", "a.json"), ("b.json", "b.json")),
    "eval_dataset": (None, ("a.json", "a.json"), ("b.json", "b.json")),
    "train_size": (500, ("7", 7), ("8", 8)),
    "eval_size": (100, ("7", 7), ("8", 8)),
    "samples_per_gpu": (None, ("7", 7), ("8", 8)),
    "max_length": (512, ("7", 7), ("8", 8)),
    "padding": ("max_length", ("longest", "longest"), ("max_length", "max_length")),
    "train_sampling_strategy": ("random", ("group_by_length", "group_by_length"), ("sequential", "sequential")),
    "dataloader_num_workers": (0, ("7", 7), ("8", 8)),
    "labels": ("sequence", ("answer", "answer"), ("all", "all")),
    "loss": ("full", ("chunked", "chunked"), ("full", "full")),
    "em_f1": (True, ("no", False), ("yes", True)),
    "em_f1_batch_size": (16, ("7", 7), ("8", 8)),
    "profile": (False, ("yes", True), ("True", True)),
    "num_train_epochs": (3, ("7", 7), ("0.5", 0.5)),
    "per_device_train_batch_size": (4, ("7", 7), ("8", 8)),
    "gradient_accumulation_steps": (4, ("7", 7), ("8", 8)),
    "learning_rate": (5e-5, ("1e-3", 1e-3), ("2e-3", 2e-3)),
    "weight_decay": (0.01, ("0", 0), ("0.1", 0.1)),
    "fp16": (True, ("False", False), ("True", True)),
    "bf16": (False, ("True", True), ("False", False)),
    "activation_checkpointing": (None, ("True", True), ("False", False)),
    "torch_compile": (False, ("True", True), ("False", False)),
    "save_strategy": ("epoch", ("no", "no"), ("steps", "steps")),
    "output_dir": (None, ("a", "a"), ("b", "b")),
    "run_name": (None, ("a", "a"), ("b", "b")),
    "report_to": ("none", ("wandb", "wandb"), ("tensorboard", "tensorboard")),
    "ddp_timeout": (1800, ("7", 7), ("8", 8)),
    "tokenizer_name": (None, ("a", "a"), ("b", "b")),
    "vocab_size": (50000, ("300", 300), ("400", 400)),
    "hidden_size": (2048, ("32", 32), ("64", 64)),
    "num_layers": (3, ("7", 7), ("8", 8)),
    "num_heads": (16, ("4", 4), ("8", 8)),
    "ff_dim": (8192, ("7", 7), ("8", 8)),
    "seq_length": (512, ("600", 600), ("700", 700)),
}


def parse(*argv: str) -> config.Options:
    return config.parse_command_line("Purpose.", list(argv))


@pytest.mark.parametrize(("variable", "flag", "default"), KNOBS, ids=[row[0] for row in KNOBS])
def test_flag_beats_variable_beats_default(variable, flag, default, gpu, monkeypatch):
    by_default, (text, by_variable), (typed, by_flag) = VALUES[flag]
    if flag in CUSTOM_SIZES:  # refused for any other model
        monkeypatch.setenv("MODEL_NAME", "custom-gpt")
    assert parse().values[flag] == by_default
    monkeypatch.setenv(variable, text)
    assert parse().values[flag] == by_variable
    assert parse(f"--{flag}", typed).values[flag] == by_flag
    assert parse(f"--{flag.replace('_', '-')}={typed}").values[flag] == by_flag


def test_empty_variable_is_no_variable(monkeypatch):
    monkeypatch.setenv("TRAIN_SIZE", " ")
    assert parse().values["train_size"] == 500


def test_every_variable_is_named_in_the_help(capsys):
    with pytest.raises(SystemExit):
        parse("--help")
    text = " ".join(capsys.readouterr().out.split())
    assert text.startswith("Purpose.")
    for variable, _, _ in KNOBS:
        assert f"Variable {variable}." in text


def test_steps_is_an_alias_of_max_steps():
    assert parse("--steps", "7").values["max_steps"] == 7


def test_evaluation_batch_follows_the_training_batch():
    assert parse("--per_device_train_batch_size", "7").values["per_device_eval_batch_size"] == 7
    given = parse("--per_device_train_batch_size", "7", "--per-device-eval-batch-size", "2")
    assert given.values["per_device_eval_batch_size"] == 2


def test_run_is_named_after_its_folder(tmp_path, monkeypatch):
    (tmp_path / "zero2").mkdir()
    monkeypatch.chdir(tmp_path / "zero2")
    assert config.trainer_flags(parse())["run_name"] == "zero2"
    assert config.trainer_flags(parse("--run_name", "mine"))["run_name"] == "mine"


def test_settings_hold_every_knob_and_each_given_flag():
    settings = parse("--warmup_steps", "5").settings()
    assert {flag for _, flag, _ in KNOBS} - set(CUSTOM_SIZES) <= settings.keys()
    assert set(CUSTOM_SIZES) <= parse("--model_name", "custom-gpt").settings().keys()
    assert settings["warmup_steps"] == 5
    assert "adam_beta1" not in settings
    assert "include_num_input_tokens_seen" not in settings
    json.dumps(settings)


@pytest.mark.parametrize("word", ["--hub_token", "--hub-token", "--push_to_hub_token", "--hub_tokn"])
@pytest.mark.parametrize("joint", [[], ["="]], ids=["apart", "joined"])
def test_a_secret_is_refused_as_a_flag_and_not_repeated(word, joint, refusal):
    line = refusal(parse, *([f"{word}=hf_canary"] if joint else [word, "hf_canary"]))
    assert line.startswith(f"error: {word}: ")
    assert "hf_canary" not in line
    assert "HF_TOKEN" in line or word == "--hub_tokn"


def test_no_flag_takes_a_secret_but_those_that_are_refused():
    flags = set(config.actions_by_flag(config.build_parser("")))
    secrets = {flag for flag in flags if re.search("token|key|secret|password", flag)}
    # counts of tokens, and names
    harmless = {flag for flag in secrets if re.search("tokens|tokenizer", flag)}
    assert secrets - harmless <= UNUSED_FLAGS.keys()


def made(options) -> TrainingArguments:
    with config.argument_errors():
        return TrainingArguments(**config.trainer_flags(options))


def test_training_arguments_hold_what_was_asked_for():
    options = parse("--learning_rate", "1e-3", "--labels", "answer", "--model_name", "tiny-bloom", "--seed", "7")
    model, data = config.own_arguments(options)
    training = made(options)
    assert (model.model_name, data.labels, training.learning_rate, training.seed) == ("tiny-bloom", "answer", 1e-3, 7)
    assert (training.eval_strategy, training.save_total_limit, training.logging_steps) == ("epoch", 1, 5)


UNKNOWN = [
    ("--train_siz", "--train_siz: unknown flag; did you mean --train_size?"),
    ("--learning-rte=1", "--learning-rte: unknown flag; did you mean --learning_rate?"),
    ("--zzz", "--zzz: unknown flag; see --help"),
    ("--num_train", "--num_train: unknown flag; did you mean --num_train_epochs?"),
    ("--batch-size 8", "--batch-size: unknown flag; did you mean --per_device_train_batch_size?"),
    ("--learning_rat 3", "--learning_rat: unknown flag; did you mean --learning_rate?"),
]


@pytest.mark.parametrize(("words", "line"), UNKNOWN)
def test_unknown_or_abbreviated_flag_is_refused_with_the_nearest(words, line, refusal):
    assert refusal(parse, *words.split()) == f"error: {line}"


@pytest.mark.parametrize("flag", REMOVED_FLAGS)
def test_flag_removed_in_transformers_5_names_its_replacement(flag, refusal):
    dashes = flag.replace("_", "-")
    expected = f"transformers 5 removed this flag; {REMOVED_FLAGS[flag]}"
    assert refusal(parse, f"--{flag}", "1") == f"error: --{flag}: {expected}"
    assert refusal(parse, f"--{dashes}=1") == f"error: --{dashes}: {expected}"


def test_removed_flags_are_gone_and_their_replacements_there():
    there = {field.name for field in dataclasses.fields(TrainingArguments)}
    assert not there & REMOVED_FLAGS.keys()
    for way_out in REMOVED_FLAGS.values():
        assert set(re.findall(r"--(\w+)", way_out)) <= there, way_out


MALFORMED = [
    ("--train_size x", "--train_size: invalid int value: 'x'; see --help"),
    ("--train_size", "--train_size: expected one argument"),
    ("--learning_rate fast", "--learning_rate: invalid float value: 'fast'"),
    ("--padding none", "--padding: invalid choice: 'none' (choose from 'max_length', 'longest')"),
    ("--eval_strategy often", "--eval_strategy: invalid choice: 'often'"),
    ("--fp16 maybe", "--fp16: Truthy value expected: got maybe"),
    ("--train_size 0", "--train_size: 0 is too small; give a whole number of at least 1"),
    ("--train-size -3", "--train-size: -3 is too small"),
    ("--steps 0", "--steps: 0 is too small"),
    ("--learning_rate nan", "--learning_rate: nan is out of range; give a number above 0"),
    ("--save_steps 0", "--save_steps: 0.0 is out of range; give a number above 0"),
]


@pytest.mark.parametrize(("words", "beginning"), MALFORMED, ids=[words for words, _ in MALFORMED])
def test_malformed_flag_is_refused_as_typed(words, beginning, refusal):
    assert refusal(parse, *words.split()).startswith(f"error: {beginning}")


MALFORMED_VARIABLES = [
    ("TRAIN_SIZE", "many", "invalid int value: 'many'; correct or unset the variable"),
    ("BATCH_SIZE", "-4", "-4 is too small; give a whole number of at least 1"),
    ("NUM_EPOCHS", "inf", "inf is out of range; give a number above 0"),
    ("FP16", "maybe", "Truthy value expected: got maybe"),
    ("PADDING", "none", "invalid choice: 'none' (choose from 'max_length', 'longest'); correct or unset the variable"),
    ("PER_DEVICE_BATCH_SIZE", "4", "this variable is not read; use BATCH_SIZE"),
]


@pytest.mark.parametrize(("variable", "text", "beginning"), MALFORMED_VARIABLES)
def test_malformed_variable_is_refused_by_its_own_name(variable, text, beginning, monkeypatch, refusal):
    monkeypatch.setenv(variable, text)
    assert refusal(parse).startswith(f"error: {variable}: {beginning}")


def test_bad_flag_is_named_even_if_the_variable_is_good(monkeypatch, refusal):
    monkeypatch.setenv("TRAIN_SIZE", "3")
    assert refusal(parse, "--train_size", "0").startswith("error: --train_size: 0")


REFUSED_BY_TRANSFORMERS = [
    (("--report_to", "foo"), "--report_to: foo is no tracker of this workshop"),
    (("--save_strategy", "steps", "--load_best_model_at_end"), "--load_best_model_at_end"),
]


@pytest.mark.parametrize(("words", "part"), REFUSED_BY_TRANSFORMERS, ids=lambda value: str(value))
def test_what_training_arguments_refuse_is_one_line_too(words, part, refusal):
    assert part in refusal(made, parse(*words))


CONTRADICTIONS = [
    (
        "--deepspeed a.json --fsdp",
        "--deepspeed: cannot be combined with --fsdp, both shard the model; give one of the two",
    ),
    ("--fsdp_config a.json", "--fsdp_config: does nothing without --fsdp; add --fsdp"),
    ("--bf16 --fp16", "--fp16: contradicts --bf16; give one of the two"),
    ("--do_train", "--do_train: has no effect in this workshop; leave it out, training is what train.py does"),
    ("--push_to_hub", "--push_to_hub: has no effect in this workshop; upload the saved folder afterwards"),
    (
        "--loss chunked --label_smoothing_factor 0.1",
        "--label_smoothing_factor: needs the logits, and chunked has none; use --loss full",
    ),
    (
        "--loss chunked --use_liger_kernel",
        "--use_liger_kernel: has a loss of its own, which would run instead; use --loss full",
    ),
]


@pytest.mark.parametrize(("words", "line"), CONTRADICTIONS)
def test_flags_that_contradict_or_do_nothing_are_refused(words, line, refusal):
    assert refusal(parse, *words.split()) == f"error: {line}"


@pytest.mark.parametrize("mode", ["max-autotune", "max-autotune-no-cudagraphs"])
def test_tf32_with_max_autotune_is_refused_as_pytorch_cannot_compile_it(mode, gpu, refusal, monkeypatch):
    line = refusal(parse, "--tf32", "True", "--torch_compile_mode", mode)
    assert line.startswith(f"error: --tf32: cannot be combined with {mode}")
    parse("--tf32", "True", "--torch_compile_mode", "reduce-overhead")
    parse("--tf32", "False", "--torch_compile_mode", mode)
    # the reason: when this no longer raises, the refusal can go
    monkeypatch.setattr(torch.backends, "fp32_precision", "tf32")
    with pytest.raises(RuntimeError, match="mix of the legacy and new APIs"):
        torch.get_float32_matmul_precision()


# Precision


def precision(*argv: str) -> str:
    return config.precision_name(parse(*argv).values)


def test_fp16_is_the_default_on_a_gpu(gpu):
    assert precision() == "fp16"
    assert precision("--fp16") == "fp16"
    assert precision("--bf16", "False") == "fp16"


def test_bf16_alone_replaces_the_default(gpu, monkeypatch):
    assert precision("--bf16") == "bf16"
    monkeypatch.setenv("BF16", "True")
    assert precision() == "bf16"


def test_fp16_false_alone_is_fp32(gpu, monkeypatch):
    assert precision("--fp16", "False") == "fp32"
    monkeypatch.setenv("FP16", "False")
    assert precision() == "fp32"


def test_bf16_on_a_gpu_without_it_is_refused(gpu, monkeypatch, refusal):
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda **_: False)
    assert refusal(parse, "--bf16") == "error: --bf16: this GPU has no bf16; use --fp16"


@pytest.mark.parametrize(("native", "expected"), [(True, "bf16"), (False, "fp32")])
def test_default_without_a_gpu_is_what_the_cpu_does_itself_and_is_announced(native, expected, monkeypatch):
    monkeypatch.setattr(config, "cpu_has_bf16", lambda: native)
    options = parse()
    assert config.precision_name(options.values) == expected
    assert options.precision_note == "default without a GPU, where fp16 does not run"
    assert parse("--fp16", "False").precision_note == ""
    assert precision("--bf16", "False") == "fp32"


def test_bf16_and_fp32_can_be_chosen_without_a_gpu(monkeypatch):
    assert precision("--bf16") == "bf16"
    assert precision("--fp16", "False") == "fp32"
    monkeypatch.setenv("BF16", "True")
    assert precision() == "bf16"


def test_fp16_without_a_gpu_is_refused_as_given(monkeypatch, refusal):
    line = "fp16 needs a CUDA GPU and there is none here; use --bf16, or --fp16 False for fp32"
    assert refusal(parse, "--fp16") == f"error: --fp16: {line}"
    monkeypatch.setenv("FP16", "True")
    assert refusal(parse) == f"error: FP16: {line}"
    assert precision("--fp16", "False") == "fp32"


def test_fp16_with_bf16_names_the_variable_that_was_set(gpu, monkeypatch, refusal):
    monkeypatch.setenv("FP16", "True")
    assert refusal(parse, "--bf16") == "error: FP16: contradicts --bf16; give one of the two"
