"""DeepSpeed JSON files: what is wrong with a participant's own, and what differs between the workshop's."""

import json
from types import SimpleNamespace

import pytest
from transformers import TrainingArguments
from transformers.integrations.deepspeed import HfTrainerDeepSpeedConfig

import config
from helpers import REPOSITORY
from parallel.ds_config import check_contradictions, check_ds_config

FILES = sorted((REPOSITORY / "ds_configs").glob("*.json"))


def load(name: str) -> dict:
    return json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())


def flat(section: dict, place: str = "") -> dict:
    """Dotted key -> value of every leaf."""
    leaves = {}
    for key, value in section.items():
        leaves |= flat(value, f"{place}{key}.") if isinstance(value, dict) else {f"{place}{key}": value}
    return leaves


def changed(dotted: str, value: object, name: str = "zero2") -> dict:
    """One of the workshop's configs with another value at this place."""
    content = load(name)
    *sections, key = dotted.split(".")
    holder = content
    for section in sections:
        holder = holder.setdefault(section, {})
    holder[key] = value
    return content


def without(dotted: str, name: str = "zero2") -> dict:
    content = load(name)
    *sections, key = dotted.split(".")
    holder = content
    for section in sections:
        holder = holder[section]
    del holder[key]
    return content


@pytest.fixture
def written(tmp_path):
    def write(content: dict | str) -> str:
        path = tmp_path / "my.json"
        path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


# A participant's own file


BROKEN = {
    "cut off": ("", ": Expecting value: line 1 column 1 (char 0); correct the JSON"),
    "a list": ("[]", ": is not a JSON object; see ds_configs/ and fsdp_configs/"),
}


@pytest.mark.parametrize(("content", "part"), BROKEN.values(), ids=BROKEN)
def test_broken_file_is_refused_with_the_place(content, part, written, refusal):
    path = written(content)
    assert refusal(check_ds_config, path).startswith(f"error: {path}{part}")


def test_file_that_is_not_there_or_is_a_folder_is_refused(tmp_path, refusal):
    assert refusal(check_ds_config, "zero9.json") == (
        "error: zero9.json: No such file or directory; see ds_configs/ and fsdp_configs/"
    )
    assert refusal(check_ds_config, str(tmp_path)).startswith(f"error: {tmp_path}: Is a directory; ")


UNKNOWN_KEYS = [
    ("zero_optimisation", {}, "did you mean zero_optimization?"),
    ("gradient_clip", 1.0, "did you mean gradient_clipping?"),
    ("zero_optimization.overlap_com", True, "did you mean overlap_comm?"),
    ("zero_optimization.offload_optimizer.devise", "cpu", "did you mean device?"),
    ("optimizer.parms", {}, "did you mean params?"),
    ("fp16.enable", True, "did you mean enabled?"),
    ("activation_checkpointing.cpu_checkpoint", True, "did you mean cpu_checkpointing?"),
]


@pytest.mark.parametrize(("dotted", "value", "way_out"), UNKNOWN_KEYS, ids=[row[0] for row in UNKNOWN_KEYS])
def test_unknown_key_is_refused_with_its_path_and_the_nearest(dotted, value, way_out, written, refusal):
    path = written(changed(dotted, value))
    assert refusal(check_ds_config, path) == f"error: {path}: {dotted}: unknown key; {way_out}"


WRONG_VALUES = [
    ("zero_optimization.stage", 4, "is 4: Input should be 0, 1, 2, 3 or "),
    ("zero_optimization.stage", "3", "is '3'; give 0, 1, 2 or 3"),
    ("zero_optimization", 2, "is 2, not an object; see ds_configs/ for examples"),
    ("zero_optimization.overlap_comm", "fast", "is 'fast': Input should be a valid boolean"),
    ("steps_per_print", "auto", 'is "auto", which no flag replaces here; give a value or remove the key'),
    ("zero_optimization.offload_optimizer", "cpu", "is 'cpu': Input should be a valid dictionary"),
    ("zero_optimization.offload_optimizer.device", "gpu", "is 'gpu': Input should be 'none', 'cpu' or 'nvme'"),
    ("optimizer.type", "Lamb", "is 'Lamb'; use AdamW, or remove the section and choose with --optim"),
]


@pytest.mark.parametrize(("dotted", "value", "part"), WRONG_VALUES, ids=[f"{k}={v}" for k, v, _ in WRONG_VALUES])
def test_wrong_value_is_refused_with_its_path(dotted, value, part, written, refusal):
    path = written(changed(dotted, value))
    assert refusal(check_ds_config, path).startswith(f"error: {path}: {dotted}: {part}")


@pytest.mark.parametrize(
    ("key", "name", "what"),
    [
        (
            "offload_param",
            "zero2",
            "stage 2 does not shard parameters, so it cannot offload; set the stage to at least 3",
        ),
        (
            "offload_optimizer",
            "zero0",
            "stage 0 does not shard the optimizer, so it cannot offload; set the stage to at",
        ),
    ],
)
def test_offload_below_its_stage_is_refused(key, name, what, written, refusal):
    path = written(changed(f"zero_optimization.{key}", {"device": "cpu"}, name))
    assert refusal(check_ds_config, path).startswith(f"error: {path}: zero_optimization.{key}: {what}")


LEFT_OUT = [
    ("gradient_clipping", "--max_grad_norm"),
    ("optimizer.params.lr", "--learning_rate"),
    ("optimizer.params.weight_decay", "--weight_decay"),
]


@pytest.mark.parametrize(("dotted", "flag"), LEFT_OUT)
def test_key_without_which_a_flag_would_have_no_effect_is_demanded(dotted, flag, written, refusal):
    path = written(without(dotted))
    key = dotted.split(".")[-1]
    expected = f'{dotted}: is missing, so {flag} would have no effect; add "{key}": "auto"'
    assert refusal(check_ds_config, path) == f"error: {path}: {expected}"


def test_files_may_leave_out_what_the_flags_decide_anyway(written):
    assert check_ds_config(written({"gradient_clipping": "auto"}))["zero_optimization"] == {}
    check_ds_config(written(without("optimizer")))


def test_warm_up_of_a_scheduler_follows_the_flags(written, refusal):
    params = dict.fromkeys(("warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"), "auto")
    check_ds_config(written(changed("scheduler", {"type": "WarmupDecayLR", "params": params})))
    del params["warmup_num_steps"]
    path = written(changed("scheduler", {"type": "WarmupDecayLR", "params": params}))
    expected = "scheduler.params.warmup_num_steps: is missing, so --warmup_steps would have no effect; add "
    assert refusal(check_ds_config, path).startswith(f"error: {path}: {expected}")


# The file against the flags


def compare(path: str, *argv: str) -> None:
    """What train.py does with a DeepSpeed file and these flags before it starts any process."""
    content = check_ds_config(path)
    options = config.parse_command_line("", list(argv))
    training = TrainingArguments(**config.trainer_flags(options))
    options.values["deepspeed"] = path
    options.deepspeed_config = content
    training.hf_deepspeed_config = HfTrainerDeepSpeedConfig(path)
    training.hf_deepspeed_config.trainer_config_process(training)
    check_contradictions(options, training)


CONTRADICTIONS = [
    ("optimizer.params.lr", 0.001, "ds optimizer.params.lr=0.001 vs hf learning_rate=5e-05"),
    ("train_batch_size", 64, "ds train_batch_size=64 vs hf train_batch_size (calculated)=16"),
    ("bf16.enabled", True, "ds bf16.enabled=True vs hf bf16|bf16_full_eval=False"),
]


@pytest.mark.parametrize(("dotted", "value", "both"), CONTRADICTIONS, ids=[row[0] for row in CONTRADICTIONS])
def test_literal_that_contradicts_a_flag_is_refused_with_both_values(
    dotted, value, both, written, monkeypatch, refusal
):
    monkeypatch.setattr(config, "cpu_has_bf16", lambda: False)
    path = written(changed(dotted, value))
    line = refusal(compare, path)
    assert line == f'error: {path}: contradicts the flags: {both}; set it to "auto" or change the flag'


def test_literal_that_equals_the_flag_is_accepted(written):
    compare(written(changed("optimizer.params.lr", 0.001)), "--learning_rate", "1e-3")
    compare(written(changed("train_batch_size", 16)))


def test_optimizer_and_scheduler_cannot_be_chosen_twice(written, refusal):
    path = written(load("zero2"))
    assert refusal(compare, path, "--optim", "adafactor") == (
        f"error: {path}: optimizer.type is AdamW, but --optim is adafactor; remove the section optimizer or the flag"
    )
    compare(path, "--optim", "adamw_torch")
    names = ("warmup_min_lr", "warmup_max_lr", "warmup_num_steps")
    path = written(changed("scheduler", {"type": "WarmupLR", "params": dict.fromkeys(names, "auto")}))
    assert "scheduler.type is WarmupLR, but --lr_scheduler_type is cosine" in refusal(
        compare, path, "--lr_scheduler_type", "cosine"
    )


def test_zero_3_that_would_save_no_weights_is_refused_unless_nothing_is_saved(written, refusal):
    path = written(without("zero_optimization.stage3_gather_16bit_weights_on_model_save", "zero3"))
    assert refusal(compare, path).endswith("is not true, so no weights would be saved; set it to true")
    compare(path, "--save_strategy", "no")


# The workshop's own files


def test_the_files_of_the_workshop_are_there():
    names = {path.stem for path in FILES}
    base = {"zero0", "zero1", "zero1_cpu_offload", "zero2", "zero2_cpu_offload", "zero2_cpu_offload_pinned_memory"}
    assert names >= base | {"zero3", "zero3_cpu_offload", "ds_zero3_offload"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_file_is_valid_and_contradicts_no_default(path):
    compare(str(path))


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_everything_that_training_arguments_know_is_auto(path):
    # values that no file would hold, so that every literal shows up as a contradiction
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


def differences(left: str, right: str) -> set[str]:
    a, b = flat(load(left)), flat(load(right))
    return {key for key in a.keys() | b.keys() if a.get(key) != b.get(key)}


@pytest.mark.parametrize("stage", [1, 2])
def test_stages_0_1_and_2_differ_in_the_stage_alone(stage):
    assert differences("zero0", f"zero{stage}") == {"zero_optimization.stage"}
    assert load(f"zero{stage}")["zero_optimization"]["stage"] == stage


def test_stage_3_differs_in_the_stage_and_its_own_keys():
    different = differences("zero2", "zero3")
    assert "zero_optimization.stage" in different
    assert {key for key in different if not key.startswith("zero_optimization.stage")} == set()


OFFLOAD = "zero_optimization.offload_"


@pytest.mark.parametrize("name", ["zero1_cpu_offload", "zero2_cpu_offload", "zero3_cpu_offload"])
def test_offload_differs_from_its_base_in_the_offload_keys_alone(name):
    different = differences(name.removesuffix("_cpu_offload"), name)
    assert different
    assert {key for key in different if not key.startswith(OFFLOAD)} == set()
    assert flat(load(name))[f"{OFFLOAD}optimizer.device"] == "cpu"
    assert flat(load(name))[f"{OFFLOAD}optimizer.pin_memory"] is False


def test_pinned_memory_differs_from_unpinned_in_pinning_alone():
    assert differences("zero2_cpu_offload", "zero2_cpu_offload_pinned_memory") == {f"{OFFLOAD}optimizer.pin_memory"}
    assert flat(load("zero2_cpu_offload_pinned_memory"))[f"{OFFLOAD}optimizer.pin_memory"] is True


def test_zero_3_offload_of_the_document_offloads_both_and_overlaps():
    zero = load("ds_zero3_offload")["zero_optimization"]
    assert zero["offload_optimizer"]["device"] == zero["offload_param"]["device"] == "cpu"
    assert zero["overlap_comm"] is True


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_zero_3_gathers_its_weights_when_it_saves(path):
    zero = json.loads(path.read_text())["zero_optimization"]
    assert zero.get("stage3_gather_16bit_weights_on_model_save", False) is (zero["stage"] == 3)
