"""Predictions from records in the format of train.py. tests/integration predicts from records of real runs."""

import json
from dataclasses import replace

import pytest

from estimate.command_line import parse_memory_plan
from estimate.memory import estimate_parts, totals
from estimate.predict_from_record import predicted_memory
from model import load_config
from settings.settings import Settings
from shared.units import MIB

pytestmark = pytest.mark.usefixtures("in_the_repository")


def settings_and_record(*flags: str) -> tuple[Settings, dict]:
    words = ["--model_name", "tiny-bloom", *flags, "--gpus", "4", "--nodes", "2"]  # a later --model_name has priority
    settings = parse_memory_plan(words, environment={})
    names = {
        flag: name for flag, name in settings.names.items() if flag not in ("gpus", "nodes")
    }  # train.py has no such flags
    record = {
        "settings": replace(settings, names=names).recorded(),
        "configs": {
            "model": load_config(settings.model).to_diff_dict(),
            "deepspeed": settings.deepspeed_config,
            "fsdp": settings.fsdp_config,
        },
        "world_size": 4,
        "nodes": ["node1", "node2"],
        "hardware": {"gpus": 4},
    }
    return settings, json.loads(json.dumps(record))


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ("--bf16", "--loss", "chunked", "--activation_checkpointing"),
        ("--model_name", "custom-gpt", "--num_layers", "2", "--max_length", "128"),
        ("--deepspeed", "ds_configs/ds_zero3_offload.json"),
        ("--fsdp", "--fsdp_config", "fsdp_configs/hybrid_shard.json", "--gradient_accumulation_steps", "1"),
    ],
)
def test_a_record_and_the_command_line_give_the_same_prediction(flags):
    settings, record = settings_and_record(*flags)
    on_gpu, on_node = totals(estimate_parts(settings), 2)
    assert predicted_memory(record)[:2] == (on_gpu / MIB, on_node / MIB)


def test_a_vision_model_is_recorded_with_its_language_part(tmp_path):
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    sizes |= {"num_key_value_heads": 2, "head_dim": 16, "vocab_size": 512}
    config = {"model_type": "qwen3_5", "text_config": sizes | {"layer_types": ["full_attention"] * 2}}
    (tmp_path / "config.json").write_text(json.dumps(config))
    _, record = settings_and_record("--model_name", str(tmp_path))
    (tmp_path / "config.json").unlink()
    assert predicted_memory(record).gpu_mib < 100


def test_some_runs_cannot_be_predicted():
    _, record = settings_and_record("--model_name", "tiny-bloom")
    assert predicted_memory(record | {"settings": {"optim": "adafactor"}}) is None
