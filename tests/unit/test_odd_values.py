"""Every flag, variable and key of a config with values that nobody means: accepted, or one line. Never a traceback."""

import copy
import json
import os

import pytest

import config
from errors import WorkshopError
from helpers import REPOSITORY
from json_files import read_json
from knobs import KNOBS
from parallel.ds_config import check_ds_config
from parallel.fsdp_config import check_fsdp_config, parallelism
from training.trainer import check_trainable

LONG_NUMBER = "1" + "0" * 5000
TEXTS = ["", "x", "-1", "1e308", "nan", LONG_NUMBER, "\udcff", "a" * 10000, "{" * 3000, "~nosuchuser"]
VALUES = [None, True, -1, 0, 1e308, float("inf"), 10**400, "", "x" * 10000, "\udcff", [], [None], {}, {"a": "auto"}]
PARSER = config.build_parser("")
FLAGS = sorted({action.dest for action in PARSER._actions} - {"help", "deepspeed"})


@pytest.fixture(autouse=True)
def one_parser(monkeypatch):
    """To build it takes longer than all else here."""
    monkeypatch.setattr(config, "build_parser", lambda description: PARSER)


def accepted_or_one_line(function, *arguments: object) -> bool:
    """Whether it was accepted."""
    try:
        function(*arguments)
    except WorkshopError as error:
        line = str(error)
        assert error.code == 2
        assert line.isprintable()
        assert len(line) < 4000
        return False
    return True


def build(argv: list[str], environment: dict) -> None:
    options = config.parse_command_line("", argv, environment={"FP16": "False"} | environment)
    check_trainable(config.build_arguments(options)[2])


@pytest.mark.parametrize("flag", FLAGS)
def test_flag(flag):
    accepted = [text for text in TEXTS if accepted_or_one_line(build, [f"--{flag}={text}"], {})]
    assert "\udcff" not in accepted, "it could not be written into the record"


@pytest.mark.parametrize("knob", KNOBS, ids=[knob.variable for knob in KNOBS])
def test_variable(knob):
    model = {"MODEL_NAME": "custom-gpt"} if knob.flag in config.CUSTOM_SIZES else {}
    accepted = [text for text in TEXTS if accepted_or_one_line(build, [], model | {knob.variable: text})]
    assert "" in accepted
    assert "\udcff" not in accepted


@pytest.mark.parametrize("flag", config.NAMES)
def test_name_that_no_file_can_have_is_refused_by_its_length(flag, refusal):
    line = refusal(build, [f"--{flag}={'a' * 256}"], {})
    assert line == f"error: --{flag}: has 256 bytes; a name has at most 255 bytes, a path 2000"
    assert "has 2001 bytes" in refusal(build, [f"--{flag}={'a/' * 1000}a"], {})


MADE_FROM_FLAGS = [
    (
        "--adam_beta1 2",
        "--optim: adamw_torch_fused cannot be made (Invalid beta parameter at index 0: 2.0); correct --",
    ),
    ("--adam_beta2 1", "--optim: adamw_torch_fused cannot be made (Invalid beta parameter at index 1"),
    ("--optim_args x", "--optim: adamw_torch_fused cannot be made ("),
    ("--optim adafactor --optim_args scale_parameter", "--optim: adafactor cannot be made ("),
    (
        '--lr_scheduler_type polynomial --lr_scheduler_kwargs {"lr_end":1}',
        "--lr_scheduler_type: polynomial cannot be made (",
    ),
    (
        '--lr_scheduler_kwargs {"a":1}',
        "--lr_scheduler_type: linear cannot be made (get_linear_schedule_with_warmup() got an unexpected",
    ),
    ("--dataloader_persistent_workers", "--dataloader_num_workers: persistent_workers option needs num_workers > 0; "),
    ("--loss chunked --use_liger_kernel", "--use_liger_kernel: has a loss of its own, which would run instead; use"),
    ("--loss chunked --label_smoothing_factor 0.1", "--label_smoothing_factor: needs the logits, and chunked has none"),
    ("--train_sampling_strategy batch_rebalance", "--train_sampling_strategy: batch_rebalance has micro batches of no"),
    ("--torch_compile_backend x", "--torch_compile_backend: x cannot be used ("),
    ("--torch_compile_mode x", "--torch_compile_backend: inductor cannot be used ("),
]


@pytest.mark.parametrize(("words", "beginning"), MADE_FROM_FLAGS, ids=[words for words, _ in MADE_FROM_FLAGS])
def test_what_the_trainer_could_not_make_is_refused(words, beginning, refusal):
    assert refusal(build, words.split(), {}).startswith(f"error: {beginning}")


def places(section: dict, before: tuple = ()) -> list[tuple]:
    found = []
    for key, value in section.items():
        found.append((*before, key))
        if isinstance(value, dict):
            found += places(value, (*before, key))
    return found


def changed(content: dict, place: tuple, value: object) -> dict:
    content = copy.deepcopy(content)
    holder = content
    for key in place[:-1]:
        holder = holder[key]
    holder[place[-1]] = value
    return content


@pytest.mark.parametrize("name", ["zero2_cpu_offload", "zero3"])
def test_key_of_a_deepspeed_config(name, tmp_path):
    content = json.loads((REPOSITORY / "ds_configs" / f"{name}.json").read_text())
    path = tmp_path / "my.json"
    for place in [*places(content), ("steps_per_print",), ("zero_optimization", "leaf_module")]:
        for value in VALUES:
            path.write_text(json.dumps(changed(content, place, value)))
            accepted_or_one_line(check_ds_config, str(path))


@pytest.mark.parametrize("name", ["hybrid_shard", "fsdp1_full_shard"])
def test_key_of_an_fsdp_config(name, tmp_path, gpu):
    content = json.loads((REPOSITORY / "fsdp_configs" / f"{name}.json").read_text())
    path = tmp_path / "my.json"

    def check() -> None:
        parallelism(check_fsdp_config(True, str(path), 4, 2))

    for place in [*places(content), ("min_num_params",), ("transformer_layer_cls_to_wrap",)]:
        for value in VALUES:
            path.write_text(json.dumps(changed(content, place, value)))
            accepted_or_one_line(check)


CONTENTS = {
    "long number": ('{"a": ' + LONG_NUMBER + "}", "holds a number of thousands of digits; correct the JSON"),
    "deep lists": ("[" * 100000, "is nested too deeply; "),
    "deep objects": ('{"a":' * 60 + "1" + "}" * 60, "is nested more than 50 deep; "),
    "surrogate": ('{"a": ["\\udcff"]}', "'\\udcff' is half of a character; correct the \\u escape"),
    "surrogate as key": ('{"\\ud800": 1}', "'\\ud800' is half of a character"),
}


@pytest.mark.parametrize(("text", "what"), CONTENTS.values(), ids=CONTENTS)
def test_json_that_python_cannot_hold_or_write(text, what, tmp_path, refusal):
    path = tmp_path / "my.json"
    path.write_text(text)
    assert refusal(read_json, path).startswith(f"error: {path}: {what}")


def test_only_a_regular_file_is_opened(tmp_path, refusal):
    """A pipe would be waited for, for ever."""
    os.mkfifo(tmp_path / "pipe")
    assert refusal(read_json, tmp_path / "pipe").startswith(f"error: {tmp_path / 'pipe'}: is no regular file; ")
    assert refusal(read_json, "/dev/zero").startswith("error: /dev/zero: is no regular file; ")
    assert refusal(read_json, tmp_path).startswith(f"error: {tmp_path}: is a folder; ")
    assert refusal(read_json, "a\0b").startswith("error: a b: embedded null byte; ")
    assert refusal(read_json, "a" * 300).startswith(f"error: {'a' * 300}: File name too long; ")
    assert refusal(read_json, "~nosuchuser/a.json").startswith("error: ~nosuchuser/a.json: No such file or directory; ")
