"""Config files of DeepSpeed and FSDP: errors in a participant's file, and differences between the workshop's files."""

import json
import os
import re
from dataclasses import replace
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import estimate_memory
import train
from distributed.config_file import read_config_file
from distributed.ds_config import check_choices, check_contradictions, check_ds_config
from distributed.fsdp_config import check_wrap_classes
from distributed.strategy import choose_strategy
from estimate.command_line import parse_memory_plan
from helpers import REPOSITORY
from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM
from settings.command_line import parse_command_line
from settings.settings import Settings
from settings.trainer_flags import trainer_flags
from shared.json_files import flatten_keys

FILES = sorted((REPOSITORY / "ds_configs").glob("*.json"))
FSDP_FILES = sorted((REPOSITORY / "fsdp_configs").glob("*.json"))
REMOVED = object()


def load(name: str) -> dict:
    return json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())


def changed_config(dotted: str, value: object, name: str = "zero2") -> dict:
    """Return one of the workshop's configs with another value at this key, or without the key (REMOVED)."""
    content = load(name)
    *sections, key = dotted.split(".")
    holder = content
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[key] = value
    if value is REMOVED:
        del holder[key]
    return content


# A participant's own file

CPU = {"device": "cpu"}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto"}}
MISTAKES = {
    "cut off": ("", "Expecting value: line 1 column 1 (char 0); correct the JSON"),
    "section": (
        changed_config("zero_optimisation", {}),
        "zero_optimisation: unknown key; did you mean zero_optimization?",
    ),
    "key": (
        changed_config("zero_optimization.offload_optimizer.devise", "cpu"),
        "zero_optimization.offload_optimizer.devise: unknown key; did you mean device?",
    ),
    "stage": (changed_config("zero_optimization.stage", "3"), "zero_optimization.stage: is '3'; give 0, 1, 2 or 3"),
    "no such stage": (changed_config("zero_optimization.stage", 4), "zero_optimization.stage: is 4; give 0, 1, 2 or 3"),
    "no section": (
        changed_config("zero_optimization", 2),
        "zero_optimization: is 2, not an object; see ds_configs/ for examples",
    ),
    "no truth value": (
        changed_config("zero_optimization.overlap_comm", "fast"),
        "zero_optimization.overlap_comm: is 'fast': Input should be a valid boolean",
    ),
    "auto": (
        changed_config("steps_per_print", "auto"),
        'steps_per_print: is "auto", but no flag gives a value for this key; give a',
    ),
    "optimizer": (
        changed_config("optimizer.type", "Lamb"),
        "optimizer.type: is 'Lamb'; use AdamW, or remove the section",
    ),
    "parameters of stage 2": (
        changed_config("zero_optimization.offload_param", CPU),
        "zero_optimization.offload_param: stage 2 does not shard parameters, so it cannot offload; set the stage to",
    ),
    "optimizer of stage 0": (
        changed_config("zero_optimization.offload_optimizer", CPU, "zero0"),
        "zero_optimization.offload_optimizer: stage 0 does not shard the optimizer, so it cannot offload; set the",
    ),
    "PyTorch's key for DeepSpeed's AdamW": (
        changed_config("optimizer.params.torch_adam", REMOVED),
        "optimizer.params.fused: DeepSpeed's own AdamW has no such key; add torch_adam, or remove fused",
    ),
    "a part of PyTorch's AdamW on the CPU": (
        changed_config("zero_optimization.offload_optimizer", CPU | {"ratio": 0.5}, "zero3"),
        "zero_optimization.offload_optimizer.ratio: only DeepSpeed's own AdamW can update a part on the",
    ),
    "clipping left out": (
        changed_config("gradient_clipping", REMOVED),
        'gradient_clipping: is missing, so --max_grad_norm would have no effect; add "gradient_clipping": "auto"',
    ),
    "rate left out": (
        changed_config("optimizer.params.lr", REMOVED),
        'optimizer.params.lr: is missing, so --learning_rate would have no effect; add "lr": "auto"',
    ),
    "warm-up left out": (
        changed_config("scheduler", WARM_UP),
        "scheduler.params.warmup_num_steps: is missing, so --warmup_steps would have no effect; add ",
    ),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_one_line_with_its_key(mistake, written, refusal):
    content, line = MISTAKES[mistake]
    path = written(content)
    assert refusal(check_ds_config, path).startswith(f"error: {path}: {line}")


def test_files_may_leave_out_the_settings_of_flags(written):
    assert check_ds_config(written({"gradient_clipping": "auto"}))["zero_optimization"] == {}


# Contradictions between the file and the flags


def compare(path: str, *argv: str) -> None:
    """Check a DeepSpeed file against these flags, as train.py does."""
    content = check_ds_config(path)
    settings = parse_command_line("", list(argv))
    training = TrainingArguments(**trainer_flags(settings))
    settings = replace(settings, deepspeed_config=content, trainer=replace(settings.trainer, deepspeed=path))
    check_choices(settings)
    training.hf_deepspeed_config = HfTrainerDeepSpeedConfig(content)
    training.hf_deepspeed_config.trainer_config_process(training)
    check_contradictions(settings, training)


LITERALS = [
    ("optimizer.params.lr", 0.001, "ds optimizer.params.lr=0.001 vs hf learning_rate=5e-05"),
    ("train_batch_size", 64, "ds train_batch_size=64 vs hf train_batch_size (calculated)=16"),
    ("bf16.enabled", True, "ds bf16.enabled=True vs hf bf16|bf16_full_eval=False"),
]


@pytest.mark.parametrize(("dotted", "value", "both"), LITERALS, ids=[row[0] for row in LITERALS])
def test_literal_that_contradicts_a_flag_is_refused_with_both_values(dotted, value, both, written, refusal):
    path = written(changed_config(dotted, value))
    line = refusal(compare, path, "--fp16", "False")
    assert line == f'error: {path}: contradicts the flags: {both}; set it to "auto" or change the flag'
    compare(written(changed_config("optimizer.params.lr", 0.001)), "--learning_rate", "1e-3")  # equals the flag


def test_optimizer_and_scheduler_cannot_be_chosen_twice(written, refusal):
    content = changed_config("scheduler", WARM_UP)
    content["scheduler"]["params"] = WARM_UP["params"] | {"warmup_num_steps": "auto"}
    path = written(content)
    line = f"error: {path}: optimizer.type is AdamW, but --optim is adafactor; remove the section optimizer or the flag"
    assert refusal(compare, path, "--optim", "adafactor") == line
    assert refusal(parse_memory_plan, ["--deepspeed", path, "--optim", "adafactor"]) == line
    line = refusal(compare, path, "--lr_scheduler_type", "cosine")
    assert "scheduler.type is WarmupLR, but --lr_scheduler_type is cosine" in line
    line = refusal(compare, written(changed_config("optimizer", REMOVED)), "--optim", "adagrad")
    assert line.startswith("error: --optim: adagrad cannot update shards; use one of adamw_torch_fused, adamw_torch, ")


def test_zero_3_that_saves_no_weights_is_refused_unless_nothing_is_saved(written, refusal):
    path = written(changed_config("zero_optimization.stage3_gather_16bit_weights_on_model_save", REMOVED, "zero3"))
    assert refusal(compare, path).endswith("is not true, so no weights would be saved; set it to true")
    compare(path, "--save_strategy", "no")


# The workshop's files. A table of docs/deepspeed-config.md explains them


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_every_setting_of_training_arguments_is_auto(path):
    # No file has these values, so every literal number shows up as a contradiction
    odd = SimpleNamespace(
        per_device_train_batch_size=31,
        gradient_accumulation_steps=37,
        world_size=41,
        max_grad_norm=43,
        learning_rate=47,
        adam_beta1=53,
        adam_beta2=59,
        adam_epsilon=61,
        weight_decay=67,
        fp16=71,
        fp16_full_eval=False,
        bf16=73,
        bf16_full_eval=False,
        save_on_each_node=False,
    )
    filled = HfTrainerDeepSpeedConfig(json.loads(path.read_text()))
    filled.trainer_config_process(odd)
    assert filled.mismatches == []
    assert filled.config["optimizer"]["params"]["lr"] == odd.learning_rate


# two files and the keys in which they may differ
COMPARED = [
    ("zero0", "zero1", r"stage"),
    ("zero0", "zero2", r"stage"),
    ("zero2", "zero3", r"(stage.*|overlap_comm)"),
    ("zero1", "zero1_cpu_offload", r"offload_.*"),
    ("zero2", "zero2_cpu_offload", r"offload_.*"),
    ("zero3", "zero3_cpu_offload", r"offload_.*"),
    ("zero2_cpu_offload", "zero2_cpu_offload_pinned_memory", r"offload_optimizer\.pin_memory"),
]


@pytest.mark.parametrize(("left", "right", "allowed"), COMPARED)
def test_files_that_the_pages_compare_differ_in_one_setting(left, right, allowed):
    one, other = flatten_keys(load(left)), flatten_keys(load(right))
    different = {key for key in one.keys() | other.keys() if one.get(key) != other.get(key)}
    assert different
    assert [key for key in different if not re.fullmatch(rf"zero_optimization\.{allowed}", key)] == []


# FSDP


@pytest.mark.parametrize("path", [p for p in FSDP_FILES if p.stem not in ("full_shard", "fsdp1_full_shard")], ids=str)
def test_fsdp_files_differ_from_full_shard_in_one_setting(path):
    base, other = (json.loads(p.read_text()) for p in (REPOSITORY / "fsdp_configs" / "full_shard.json", path))
    different = {key for key in base | other if base.get(key) != other.get(key)}
    message = f"differs from full_shard.json in {different}; a file shows the effect of one setting"
    assert len(different) == 1 or different == {"dp_shard_size", "dp_replicate_size"}, message


def with_fsdp_file(path: object, ranks: int = 4, ranks_per_node: int = 1) -> Settings:
    flags = ["--fsdp", "--fsdp_config", str(path)]
    return read_config_file(parse_command_line("", flags, environment={}), ranks, ranks_per_node)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"reshard_after_foward": True}, "reshard_after_foward: unknown key; did you mean reshard_after_forward?"),
        ({"forward_prefetch": True}, 'forward_prefetch: FSDP2 has no such key; remove it, or set "version": 1'),
        ({"reshard_after_forward": "full_shard"}, "reshard_after_forward: is 'full_shard'; give true or false"),
        ({"transformer_layer_cls_to_wrap": "BloomBlock"}, "is 'BloomBlock'; give a list of class names"),
        ({"dp_shard_size": 3, "dp_replicate_size": 2}, "3 x dp_replicate_size 2 is not the world size 4"),
        ({"dp_shard_size": -1}, 'dp_shard_size: is -1; give "auto" or a whole number above 0'),
        ({"dp_replicate_size": "2"}, "dp_replicate_size: is '2'; give \"auto\" or a whole number above 0"),
        (
            dict.fromkeys(("dp_shard_size", "dp_replicate_size"), "auto"),
            "dp_shard_size 1 leaves nothing to shard (ranks per node: 1); use ",
        ),
    ],
)
def test_a_mistake_in_an_fsdp_file_is_one_line(written, refusal, content, message):
    path = written(content)
    error = refusal(with_fsdp_file, path)
    assert error.startswith(f"error: {path}")
    assert message in error


@pytest.mark.parametrize("program", [train, estimate_memory], ids=["train", "estimate"])
def test_an_old_fsdp_string_is_refused_with_its_replacement(program, refusal, main_of, monkeypatch):
    monkeypatch.setattr(os, "environ", os.environ.copy())  # train.py sets variables
    refused = "error: --fsdp: 'full_shard' is a deprecated form; use --fsdp --fsdp_config with a file of fsdp_configs/"
    assert refusal(main_of, program, "--fsdp", "full_shard") == refused


@pytest.mark.parametrize(
    ("ranks", "per_node", "line"),
    [
        (8, 4, "FSDP2 HYBRID_SHARD on 8 ranks = 2 replicas x 4 shards"),
        (4, 4, "FSDP2 FULL_SHARD on 4 ranks = 4 shards"),
        (1, 1, "FSDP2 FULL_SHARD on 1 rank"),
    ],
)
def test_auto_means_ranks_per_node_and_nodes(ranks, per_node, line):
    settings = with_fsdp_file(REPOSITORY / "fsdp_configs" / "hybrid_shard.json", ranks, per_node)
    assert choose_strategy(settings, ranks).line == f"strategy: {line}"


def test_an_unknown_class_to_wrap_lists_the_classes_of_the_model(refusal):
    model = CustomGPTForCausalLM(
        CustomGPTConfig(vocab_size=8, hidden_size=4, num_layers=1, num_heads=1, ff_dim=4, seq_length=4)
    )
    check_wrap_classes({}, None, model)
    line = refusal(check_wrap_classes, {"transformer_layer_cls_to_wrap": ["BloomBlock"]}, "f.json", model)
    assert "the model has no BloomBlock; choose from Attention, CustomGPTBlock" in line


@pytest.mark.parametrize(("offload", "backend"), [(True, "cuda:nccl,cpu:gloo"), (False, None)])
def test_cpu_offload_asks_for_a_back_end_for_cpu_tensors(gpu, offload, backend):
    settings = parse_command_line("", ["--model_name", "tiny-bloom", "--fsdp"])
    settings = replace(settings, fsdp_config={"cpu_offload": offload})
    assert trainer_flags(settings)["ddp_backend"] == backend
