"""LoRA: the layers that get adapters, the merged model, and what is refused or warned about."""

import copy
import json
from collections.abc import Callable

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedModel,
    Qwen2Config,
    Qwen2ForCausalLM,
    set_seed,
)

from estimate.model_shape import AliveBytes
from guard.preconditions import describe_adapters
from helpers import add_peft_adapters
from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM
from models.lora import ADAPTERS, LoraLinear, add_adapters, count_adapter_elements, merged_model, save_adapters
from settings.command_line import parse_command_line

RANK = 3
SIZES = {"vocab_size": 64, "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 24}
GPT_SIZES = {"vocab_size": 64, "hidden_size": 16, "num_heads": 2, "ff_dim": 24, "seq_length": 32}
ATTENTION, MLP = ("q_proj", "k_proj", "v_proj", "o_proj"), ("gate_proj", "up_proj", "down_proj")
LLAMA_LAYERS = {*(f"self_attn.{name}" for name in ATTENTION), *(f"mlp.{name}" for name in MLP)}
BLOOM_LAYERS = {"self_attention.query_key_value", "self_attention.dense", "mlp.dense_h_to_4h", "mlp.dense_4h_to_h"}
# Model, name of its first block, and the layers of a block that get adapters. Only BLOOM and Qwen have tied heads
MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str, set[str]]] = {
    "bloom": (
        lambda: BloomForCausalLM(BloomConfig(vocab_size=64, hidden_size=16, n_layer=2, n_head=2)),
        "transformer.h.0",
        BLOOM_LAYERS,
    ),
    "llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=2, tie_word_embeddings=False)),
        "model.layers.0",
        LLAMA_LAYERS,
    ),
    "qwen, with biases": (
        lambda: Qwen2ForCausalLM(
            Qwen2Config(**SIZES, num_hidden_layers=2, num_key_value_heads=1, tie_word_embeddings=True)
        ),
        "model.layers.0",
        LLAMA_LAYERS,
    ),
    "custom-gpt": (
        lambda: CustomGPTForCausalLM(CustomGPTConfig(**GPT_SIZES, num_layers=2)),
        "blocks.0",
        {*(f"attention.{name}" for name in ("q", "k", "v", "out")), "ff_in", "ff_out"},
    ),
}
TOKENS = torch.arange(40).reshape(2, 20)


def model_with_adapters(
    name: str, frozen_dtype: torch.dtype = torch.float32
) -> tuple[PreTrainedModel, PreTrainedModel]:
    """Return a model, and a copy with adapters."""
    set_seed(1)
    base = MODELS[name][0]().eval()
    # A bias of zeros would hide that a merged model has lost it
    for key, parameter in base.named_parameters():
        if key.endswith("bias"):
            torch.nn.init.normal_(parameter)
    model = copy.deepcopy(base)
    add_adapters(model, RANK, frozen_dtype)
    return base, model


def train_adapters(model: PreTrainedModel) -> None:
    """Give the adapters values as after a training: B no longer contains only zeros."""
    for name, parameter in model.named_parameters():
        if name.endswith("lora_b"):
            torch.nn.init.normal_(parameter)


@torch.no_grad()
def logits(model: PreTrainedModel) -> torch.Tensor:
    return model(input_ids=TOKENS).logits


@pytest.mark.parametrize("name", MODELS)
def test_each_linear_layer_of_the_blocks_gets_adapters_and_the_rest_is_frozen(name: str):
    _, block, layers = MODELS[name]
    base, model = model_with_adapters(name)
    found = {each for each, module in model.named_modules() if isinstance(module, LoraLinear)}
    assert {each.removeprefix(f"{block}.") for each in found if each.startswith(f"{block}.")} == layers
    assert len(found) == 2 * len(layers), "layers outside the two blocks, such as the head, get no adapters"
    trainable = {each for each, parameter in model.named_parameters() if parameter.requires_grad}
    assert trainable == {f"{each}.{adapter}" for each in found for adapter in ADAPTERS}
    parameters = dict(model.named_parameters())
    assert sum(parameters[each].numel() for each in trainable) == count_adapter_elements(model, RANK)
    assert parameters.keys() - trainable == dict(base.named_parameters()).keys()
    assert torch.equal(logits(model), logits(base)), "an adapter changes nothing before its first step"


# What PEFT 0.21.2 needs, apart from the names of the layers. alpha / r is the scale of 2
FOR_PEFT = {
    "peft_type": "LORA",
    "task_type": "CAUSAL_LM",
    "base_model_name_or_path": "org/base",
    "inference_mode": True,
    "r": RANK,
    "lora_alpha": 2 * RANK,
    "lora_dropout": 0.0,
    "bias": "none",
}


@pytest.mark.parametrize("name", MODELS)
def test_the_merged_model_and_the_adapters_for_peft_compute_what_the_model_with_adapters_does(name: str, tmp_path):
    base, model = model_with_adapters(name)
    train_adapters(model)
    expected = logits(model)
    assert (expected - logits(base)).abs().max() > 1e-2
    model.generation_config.max_new_tokens = 7
    before = copy.deepcopy(model.state_dict())
    merged_model(model, model.state_dict()).save_pretrained(tmp_path)
    saved, loading = AutoModelForCausalLM.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(loading.values()), loading
    assert torch.allclose(logits(saved), expected, rtol=1e-4, atol=1e-5)
    assert type(saved) is type(base)
    assert saved.generation_config.max_new_tokens == 7
    tied = saved.get_output_embeddings().weight is saved.get_input_embeddings().weight
    assert tied == base.config.tie_word_embeddings
    save_adapters(model.state_dict(), tmp_path / "adapter", "org/base")
    config = json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())
    assert len(config.pop("target_modules")) == 2 * len(MODELS[name][2])
    assert config == FOR_PEFT
    assert torch.allclose(logits(add_peft_adapters(base, tmp_path / "adapter")), expected, rtol=1e-4, atol=1e-5)
    # The live model may still answer questions after it was saved
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(model), expected)


class HostBytes(AliveBytes):
    """Count the bytes of all storages in the memory of the host. They all count as activations."""

    def __init__(self) -> None:
        super().__init__(0, 0, torch.Size())

    def add(self, tensor: torch.Tensor, kind: str) -> None:
        if tensor.device.type == "cpu":
            super().add(tensor, "activations")


@pytest.mark.parametrize("tied", [False, True])
def test_a_merge_needs_no_more_memory_than_the_weights_while_they_were_loaded(tied: bool):
    """The estimate counts the fp32 weights of the base while they are loaded, but nothing for the merged model."""
    sizes = SIZES | {"num_hidden_layers": 8, "tie_word_embeddings": tied}
    base = LlamaForCausalLM(LlamaConfig(**sizes))
    weights_while_loading = sum(each.nbytes for each in base.parameters())
    largest = max(each.nbytes for each in base.parameters())
    add_adapters(base, RANK, torch.bfloat16)
    gathered = {name: weight.clone() for name, weight in base.state_dict().items()}
    adapters = sum(weight.nbytes for name, weight in gathered.items() if name.endswith(ADAPTERS))
    counting = HostBytes()
    for weight in gathered.values():
        counting.add(weight, "")
    del weight
    with counting:
        merged_model(base, gathered)
    peak = max(alive.activations for alive in counting.history["loss"])
    # A merged layer also needs its product of adapters and its sum
    assert weights_while_loading <= peak < weights_while_loading + adapters + 3 * largest


EXPERTS = SIZES | {"num_hidden_layers": 1, "num_key_value_heads": 1}
STATE_SPACE = {"vocab_size": 64, "hidden_size": 16, "num_hidden_layers": 1, "state_size": 4, "time_step_rank": 2}
DESCRIBED = {  # sizes, layers with adapters, other matrices, and layers for which rank 12 is too large
    "llama": (EXPERTS, "q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj", "", "k_proj, v_proj"),
    # 8 experts with three matrices each, two of them in one parameter, and a router
    "mixtral": (
        EXPERTS,
        "q_proj, k_proj, v_proj, o_proj",
        f"; none on the {8 * (3 * 16 * 24 + 16):,} parameters of gate, gate_up_proj, down_proj",
        "k_proj, v_proj",
    ),
    "mamba": (
        STATE_SPACE,
        "in_proj, x_proj, dt_proj, out_proj",
        f"; none on the {32 * 4 + 32 * 4} parameters of A_log, conv1d",
        "x_proj, dt_proj",
    ),
}


@pytest.mark.parametrize("family", DESCRIBED)
def test_the_log_says_which_layers_have_adapters_and_for_which_the_rank_is_too_large(family: str):
    sizes, layers, others, too_small = DESCRIBED[family]
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **sizes))
    small = copy.deepcopy(model)
    add_adapters(small, 2)
    line = f"LoRA: adapters on {layers}{others}"
    assert describe_adapters(small, 2) == line
    assert {parameter.device.type for parameter in small.parameters()} == {"meta"}, "the adapters take no memory either"
    add_adapters(model, 12)
    more = f"LORA_RANK 12 is larger than the smaller side of {too_small}: less is enough there"
    assert describe_adapters(model, 12) == f"{line}\n{more}"


# What is refused, or warned about


def test_a_model_without_linear_layers_is_refused(refusal):
    """GPT-2 has layers of its own class, Conv1D. Its head is an nn.Linear."""
    model = GPT2LMHeadModel(GPT2Config(vocab_size=64, n_embd=8, n_layer=1, n_head=1))
    what = "GPT2LMHeadModel has no layers of the class torch.nn.Linear to put adapters on"
    assert refusal(add_adapters, model, 8) == (
        f"error: --lora_rank: {what}; leave it out, or use a BLOOM, Llama or Qwen"
    )


LOW = "warning: the learning rate 5e-05 is low for LoRA, which usually needs 1e-4 to 2e-3; set LEARNING_RATE"
RANDOM = "warning: LORA_RANK freezes weights that are random, so the model learns little; use a pretrained model"


@pytest.mark.parametrize(
    ("flags", "warnings"),
    [
        ("--lora_rank 8", [LOW]),
        ("--lora_rank 8 --learning_rate 1e-4", []),
        ("--lora_rank 8 --learning_rate 1e-4 --model_name tiny-bloom", [RANDOM]),
        ("--lora_rank 8 --from_scratch", [LOW, RANDOM]),
        ("--model_name tiny-bloom", []),
    ],
)
def test_choices_with_which_lora_learns_little_are_warnings(flags, warnings):
    lines = parse_command_line("", flags.split()).knob_lines()
    assert [line for line in lines if line.startswith("warning")] == warnings
