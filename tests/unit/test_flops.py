"""Counts of tokens and floating-point operations, and the peak of the hardware."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoConfig, AutoModelForCausalLM

from measure import flops
from measure.flops import ModelFlops, matmul_peak, model_flops, published_peak
from models.custom_model import CUSTOM_GPT
from records.writer import RunRecord

CPU = torch.device("cpu")
SMALL = {"vocab_size": 500, "hidden_size": 64}
SIZES = SMALL | {"num_hidden_layers": 3, "num_attention_heads": 4}
LLAMA = SIZES | {"intermediate_size": 160, "num_key_value_heads": 2, "tie_word_embeddings": False}
SPECIAL_TOKENS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
FAMILIES = {
    CUSTOM_GPT: SIZES | {"ff_dim": 256, "seq_length": 64},
    "bloom": SIZES,
    "falcon": SIZES | {"multi_query": True},
    "gemma2": LLAMA | {"head_dim": 32, "sliding_window": 48},
    "gpt2": SIZES,
    "gpt_neox": SIZES | {"intermediate_size": 160},
    "llama": LLAMA,
    "mistral": LLAMA | {"head_dim": 32, "sliding_window": 48},
    "mpt": {"vocab_size": 500, "d_model": 64, "n_layers": 3, "n_heads": 4},
    "opt": SIZES | {"ffn_dim": 160, "word_embed_proj_dim": 32},
    "phi": SIZES | {"intermediate_size": 160},
    "qwen2": LLAMA,
    "qwen3": LLAMA | {"head_dim": 48},  # heads x head size is three times the hidden size
}


def create(family: str, **sizes: object) -> torch.nn.Module:
    return AutoModelForCausalLM.from_config(AutoConfig.for_model(family, **SPECIAL_TOKENS | sizes))


@pytest.mark.parametrize("family", FAMILIES)
def test_operations_agree_with_pytorchs_count(family: str):
    """The head needs operations only for the tokens that count in the loss."""
    # PyTorch's counter does not know the operations of the fused attention on the CPU
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = create(family, **FAMILIES[family])
        tokens = torch.randint(3, 500, (2, 48))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    per_model = ModelFlops(model, max_length=48)
    needed = per_model.count_operations(real=2 * 48, counted=2 * 48, squares=2 * 48 * 48)
    assert needed == pytest.approx(counter.get_total_flops(), rel=0.01)
    head = model.get_output_embeddings().weight.numel()
    assert needed - per_model.count_operations(real=2 * 48, counted=48, squares=2 * 48 * 48) == 6 * head * 48


WINDOW = "the attention sees only 47 tokens at a time, and MAX_LENGTH is 48"
NOT_LINEAR = "is not the weight of a linear layer, so its operations are unknown"
NOT_USUAL = "not every layer has one attention of the usual kind, so its operations are unknown"
LOCAL = {"window_size": 47, "attention_types": [[["global", "local", "local"], 1]]}
UNKNOWN = {
    "mistral": (LLAMA | {"sliding_window": 47}, WINDOW),
    "gpt_neo": (SMALL | {"num_layers": 3} | LOCAL, WINDOW),
    "mixtral": (LLAMA, f"model.layers.0.mlp.gate.weight {NOT_LINEAR}"),
    "mamba": (SMALL | {"num_hidden_layers": 1}, f"backbone.layers.0.mixer.A_log {NOT_LINEAR}"),
    "lfm2": (LLAMA | {"layer_types": 3 * ["conv"]}, f"model.layers.0.conv.conv.weight {NOT_LINEAR}"),
    # Scores and weighted sums have different widths
    "minicpm3": (LLAMA, NOT_USUAL),
    # Each layer also has an attention to an encoder, which a causal LM does not use
    "bart": ({"vocab_size": 500, "d_model": 64, "decoder_layers": 3, "decoder_attention_heads": 4}, NOT_USUAL),
    # Each layer computes two attentions
    "diffllama": (LLAMA, NOT_USUAL),
}


@pytest.mark.parametrize("family", UNKNOWN)
def test_a_model_whose_operations_are_unknown_has_no_mfu_with_the_reason(family: str):
    sizes, reason = UNKNOWN[family]
    record = RunRecord("7", "output/7")
    with torch.device("meta"):
        model = create(family, **sizes)
    assert model_flops(model, 48, record) is None
    assert record.reasons == {"train.mfu_percent": reason}


def test_a_frozen_parameter_needs_4_operations_per_token():
    def count(model: torch.nn.Module) -> float:
        return ModelFlops(model, max_length=48).count_operations(real=10, counted=5, squares=0)

    model = create("llama", **LLAMA)
    model.lm_head.weight.requires_grad = False
    frozen = model.model.layers[0].mlp.requires_grad_(False)
    matrices = sum(p.numel() for p in frozen.parameters())
    assert count(create("llama", **LLAMA)) - count(model) == 2 * (10 * matrices + 5 * 500 * 64)


@pytest.mark.parametrize(
    ("gpu", "precision", "tflops"),
    [
        ("Tesla V100-SXM2-32GB", "float16", 125),
        ("NVIDIA A100-SXM4-80GB", "bfloat16", 312),
        ("NVIDIA A100-PCIE-40GB", "tf32", 156),
        ("NVIDIA H100 PCIe", "float16", 756),
        ("NVIDIA GeForce RTX 4090", "float32", 82.6),
        ("Tesla V100-SXM2-32GB", "tf32", None),  # has no tf32
        ("NVIDIA A100-SXM4-40GB MIG 1g.5gb", "float16", None),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "float16", None),
        ("NVIDIA A40-48Q", "float16", None),  # a virtual GPU
        ("NVIDIA RTX A4000", "float16", None),  # not an A40
    ],
)
def test_the_peak_of_a_gpu_is_the_published_one_or_none(gpu: str, precision: str, tflops: float | None):
    assert published_peak(gpu, precision) == (tflops and tflops * 1e12)


def test_the_peak_of_a_cpu_is_measured_in_the_runs_precision(monkeypatch):
    multiplied = []
    multiply = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, out: multiplied.append(a.dtype) or multiply(a, b, out=out))
    monkeypatch.setattr(flops, "SECONDS", 0)
    monkeypatch.setattr(flops, "CPU_SIZE", 64)
    for precision in (torch.float32, torch.bfloat16):
        assert matmul_peak(precision, CPU) > 1e6
    assert list(dict.fromkeys(multiplied)) == [torch.float32, torch.bfloat16]
