"""Flags, config keys and models that tensor parallelism refuses.

tests/integration/test_strategies.py trains with tensor parallelism.
"""

import json

import pytest
from transformers import AutoConfig, AutoModelForCausalLM

from distributed.config_file import read_config_file
from distributed.tensor_parallel import check_saving_flags, check_tensor_parallel_model
from estimate.command_line import parse_plan
from settings.command_line import parse_command_line

TENSOR_PARALLEL = ("--model_name", "custom-gpt", "--tensor_parallel", "2", "--save_strategy", "no")
COMBINATIONS = {  # flags, ranks, text of the error
    "DeepSpeed": (["--deepspeed", "zero1.json"], 2, "cannot be combined with --deepspeed; use --fsdp to shard"),
    "chunked loss": (["--loss", "chunked"], 2, "--loss: chunked needs the whole head"),
    "checkpoints": (["--save_strategy", "epoch"], 2, "no checkpoints of a model that is cut; give --save_strategy no"),
    "resuming": (["--resume_from_checkpoint"], 2, "--resume_from_checkpoint: --tensor_parallel writes no checkpoints"),
    "odd ranks": ([], 3, "2 does not divide 3 rank(s); start 2, or a multiple"),
    "ranks to spare": ([], 4, "and the other ranks have no work; start 2 ranks, or add --fsdp"),
    "no ranks to spare": (["--fsdp"], 2, "--fsdp: --tensor_parallel 2 leaves no ranks to shard over; leave it out"),
}


@pytest.mark.promise("Tensor parallelism: the same losses, also in fp16; what it refuses; a stop")
@pytest.mark.parametrize(("words", "ranks", "what"), COMBINATIONS.values(), ids=COMBINATIONS)
def test_a_flag_that_cannot_be_combined_is_named(refusal, words, ranks, what):
    words = [*TENSOR_PARALLEL, *words]
    assert what in refusal(
        lambda: check_saving_flags(read_config_file(parse_command_line("", words, gpu=True), ranks, ranks))
    )


@pytest.mark.parametrize(
    ("content", "what"),
    [
        ({"cpu_offload": True}, "cpu_offload: true cannot be combined with --tensor_parallel; give false"),
        ({"reshard_after_forward": False}, "reshard_after_forward: false cannot be combined"),
        ({"dp_shard_size": "auto"}, 'dp_shard_size: "auto" cannot be combined with --tensor_parallel; leave it out'),
        ({"transformer_layer_cls_to_wrap": ["CustomGPTBlock"]}, "transformer_layer_cls_to_wrap: "),
    ],
)
def test_an_fsdp_key_that_cannot_be_combined_is_named(refusal, tmp_path, content, what):
    path = tmp_path / "my.json"
    path.write_text(json.dumps(content))
    flags = [*TENSOR_PARALLEL, "--fsdp", "--fsdp_config", str(path), "--gpus", "8", "--nodes", "8"]
    assert f"{path}: {what}" in refusal(lambda: parse_plan(flags, environment={}))


def model(kind: str, **sizes: int):
    small = {"vocab_size": 32, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 4}
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **small | sizes))


@pytest.mark.parametrize(
    ("kind", "sizes", "what"),
    [
        ("bloom", {}, "transformers has no tensor parallel plan for BloomForCausalLM"),
        ("mixtral", {"num_key_value_heads": 4}, "the plan for MixtralForCausalLM has the style "),
        (
            "qwen3",
            {"num_key_value_heads": 4},
            "the plan for Qwen3ForCausalLM has the style replicated_with_grad_allreduce, which",
        ),
        ("llama", {"num_key_value_heads": 2}, "4 does not divide the model's 2 key/value heads; choose a divisor"),
        ("llama", {"num_attention_heads": 2}, "4 does not divide the model's 2 attention heads; choose a divisor"),
    ],
)
def test_a_model_that_cannot_be_sharded_is_named(refusal, kind, sizes, what):
    assert what in refusal(lambda: check_tensor_parallel_model(model(kind, **sizes), 4))
