"""Counts of tokens and floating-point operations, and the peak of the hardware."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from data_loader import IGNORED
from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM
from training import flops
from training.flops import ModelFlops, count_tokens, matmul_peak, published_peak

CPU = torch.device("cpu")
SIZES = {"vocab_size": 500, "hidden_size": 64}
LLAMA = SIZES | {"intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4}
MODELS = {
    "bloom": lambda: BloomForCausalLM(BloomConfig(**SIZES, n_layer=3, n_head=4)),
    "llama": lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False)),
    "custom-gpt": lambda: CustomGPTForCausalLM(
        CustomGPTConfig(**SIZES, num_layers=3, num_heads=4, ff_dim=256, seq_length=64)
    ),
}


def test_tokens_of_a_batch_are_counted():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    labels = torch.tensor([[5, IGNORED, 7, 8, IGNORED, IGNORED], [5, 6, IGNORED, IGNORED, IGNORED, IGNORED]])
    counts = count_tokens({"attention_mask": mask, "labels": labels})
    assert counts.tolist() == [6, 6, 3, 16 + 4]


@pytest.mark.parametrize("name", MODELS)
def test_operations_agree_with_pytorchs_count(name: str):
    """The head needs operations only for the tokens that count in the loss."""
    # PyTorch's counter does not know the operations of the fused attention on the CPU
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = MODELS[name]()
        tokens = torch.randint(0, 500, (2, 48))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    per_model = ModelFlops(model)
    needed = per_model.count_operations(real=2 * 48, counted=2 * 48, squares=2 * 48 * 48)
    assert needed == pytest.approx(counter.get_total_flops(), rel=0.02)
    assert needed - per_model.count_operations(real=2 * 48, counted=48, squares=2 * 48 * 48) == 6 * 500 * 64 * 48


def test_a_frozen_parameter_needs_4_operations_per_token():
    model = MODELS["llama"]()
    model.lm_head.weight.requires_grad = False
    frozen = model.model.layers[0].mlp.requires_grad_(False)
    trained = ModelFlops(MODELS["llama"]()).count_operations(real=10, counted=5, squares=0)
    partly_frozen = ModelFlops(model).count_operations(real=10, counted=5, squares=0)
    assert trained - partly_frozen == 2 * (10 * sum(p.numel() for p in frozen.parameters()) + 5 * 500 * 64)


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
