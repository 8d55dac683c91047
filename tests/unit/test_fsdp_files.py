"""FSDP config files: what is refused, what the sizes come to, what the strategies are called."""

import json

import pytest

import config
from config import parse_command_line
from custom_model import CustomGPTConfig, CustomGPTForCausalLM
from helpers import REPOSITORY
from parallel.fsdp_config import check_fsdp_config, check_wrap_classes, fsdp_name

FILES = sorted((REPOSITORY / "fsdp_configs").glob("*.json"))


@pytest.mark.parametrize("path", [p for p in FILES if p.stem not in ("full_shard", "fsdp1_full_shard")], ids=str)
def test_shipped_files_differ_from_full_shard_in_one_thing(path):
    base, other = (json.loads(p.read_text()) for p in (REPOSITORY / "fsdp_configs" / "full_shard.json", path))
    different = {key for key in base | other if base.get(key) != other.get(key)}
    assert len(different) == 1 or different == {"dp_shard_size", "dp_replicate_size"}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"reshard_after_foward": True}, "reshard_after_foward: unknown key; did you mean reshard_after_forward?"),
        ({"forward_prefetch": True}, 'forward_prefetch: FSDP2 has no such key; remove it, or set "version": 1'),
        ({"reshard_after_forward": "full_shard"}, "reshard_after_forward: is 'full_shard'; give true or false"),
        ({"transformer_layer_cls_to_wrap": "BloomBlock"}, "is 'BloomBlock'; give a list of class names"),
        ({"dp_shard_size": 3, "dp_replicate_size": 2}, "3 x dp_replicate_size 2 is not the world size 4"),
    ],
)
def test_wrong_file_is_one_line(tmp_path, refusal, monkeypatch, content, message):
    monkeypatch.setenv("WORLD_SIZE", "4")
    path = tmp_path / "fsdp.json"
    path.write_text(json.dumps(content))
    error = refusal(check_fsdp_config, True, str(path))
    assert error.startswith(f"error: {path}")
    assert message in error


def test_an_old_string_is_refused_with_what_to_use(refusal):
    line = refusal(check_fsdp_config, "full_shard auto_wrap", None)
    assert line.endswith("removes; use --fsdp --fsdp_config with a file of fsdp_configs/")


@pytest.mark.parametrize(("world", "per_node", "shard", "replicate"), [(8, 4, 4, 2), (4, 4, 4, 1), (2, 1, 1, 2)])
def test_auto_means_ranks_per_node_and_nodes(monkeypatch, world, per_node, shard, replicate):
    monkeypatch.setenv("WORLD_SIZE", str(world))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(per_node))
    config = check_fsdp_config(True, str(REPOSITORY / "fsdp_configs" / "hybrid_shard.json"))
    assert (config["dp_shard_size"], config["dp_replicate_size"]) == (shard, replicate)
    assert fsdp_name(config) == ("FSDP2 HYBRID_SHARD" if replicate > 1 else "FSDP2 FULL_SHARD")


def test_unknown_class_to_wrap_lists_those_of_the_model(refusal):
    model = CustomGPTForCausalLM(
        CustomGPTConfig(vocab_size=8, hidden_size=4, num_layers=1, num_heads=1, ff_dim=4, seq_length=4)
    )
    check_wrap_classes({}, None, model)
    line = refusal(check_wrap_classes, {"transformer_layer_cls_to_wrap": ["BloomBlock"]}, "f.json", model)
    assert "the model has no BloomBlock; choose from Attention, CustomGPTBlock" in line


@pytest.mark.parametrize(("offload", "backend"), [(True, "cuda:nccl,cpu:gloo"), (False, None)])
def test_cpu_offload_asks_for_a_back_end_for_cpu_tensors(gpu, offload, backend):
    options = parse_command_line("", ["--model_name", "tiny-bloom", "--fsdp"])
    options.fsdp_config = {"cpu_offload": offload}
    assert config.trainer_flags(options)["ddp_backend"] == backend
