"""Tokens, operations and the peak that they are compared with."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import BloomConfig, BloomForCausalLM, LlamaConfig, LlamaForCausalLM

from custom_model import CustomGPTConfig, CustomGPTForCausalLM
from data_loader import IGNORED
from training import flops
from training.flops import ModelFlops, cache_file, count_tokens, matmul_peak, memory_bandwidth

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


def test_tokens_of_a_batch():
    mask = torch.tensor([[1, 1, 1, 1, 0, 0], [1, 1, 0, 0, 0, 0]])
    labels = torch.tensor([[5, IGNORED, 7, 8, IGNORED, IGNORED], [5, 6, IGNORED, IGNORED, IGNORED, IGNORED]])
    counts = count_tokens({"attention_mask": mask, "labels": labels})
    assert counts.tolist() == [6, 6, 3, 16 + 4]


@pytest.mark.parametrize("name", MODELS)
def test_operations_are_those_that_pytorch_counts(name: str, monkeypatch):
    # whose counter knows no operations of the fused attention on the CPU
    with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        model = MODELS[name]()
        tokens = torch.randint(0, 500, (2, 48))
        with FlopCounterMode(display=False) as counter:
            model(input_ids=tokens, attention_mask=torch.ones_like(tokens), labels=tokens).loss.backward()
    needed = ModelFlops(model).needed(real=2 * 48, counted=2 * 48, squares=2 * 48 * 48)
    assert needed == pytest.approx(counter.get_total_flops(), rel=0.02)


def test_the_head_computes_for_the_tokens_that_count_alone():
    model = ModelFlops(MODELS["bloom"]())
    assert model.head == 500 * 64
    assert model.needed(96, 96, 0) - model.needed(96, 10, 0) == 6 * 500 * 64 * 86


def test_a_mixture_of_experts_has_no_such_number():
    model = MODELS["llama"]()
    model.config.num_local_experts = 8
    with pytest.raises(ValueError, match="of the model's experts only some compute for a token"):
        ModelFlops(model)


def test_the_peak_is_measured_once_for_each_precision(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(flops, "SECONDS", 0)
    monkeypatch.setattr(flops, "CPU_SIZE", 64)
    first = matmul_peak(torch.float32, CPU)
    assert first > 1e6
    ((key, value),) = json.loads(cache_file().read_text()).items()
    assert value == first
    assert f"torch {torch.__version__}, torch.float32" in key
    monkeypatch.setattr(flops, "measure_peak", lambda dtype, device: 1e12)
    assert matmul_peak(torch.float32, CPU) == first
    assert matmul_peak(torch.bfloat16, CPU) == 1e12
    assert len(json.loads(cache_file().read_text())) == 2


def test_the_memory_is_measured_once_and_stands_beside_the_peak(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flops, "SECONDS", 0)
    monkeypatch.setattr(flops, "COPIED_ON_CPU", 2**16)
    monkeypatch.setattr(flops, "measure_peak", lambda dtype, device: 1e12)
    first = memory_bandwidth(CPU)
    assert first > 1e6
    matmul_peak(torch.float32, CPU)
    assert sorted(json.loads(cache_file().read_text()).values()) == sorted([first, 1e12])
    monkeypatch.setattr(flops, "measure_copy", lambda device: 1.0)
    assert memory_bandwidth(CPU) == first


def test_a_copy_reads_and_writes(monkeypatch):
    monkeypatch.setattr(flops, "fastest", lambda operation, device: operation() is None or 0.5)
    monkeypatch.setattr(flops, "COPIED_ON_CPU", 1000)
    assert flops.measure_copy(CPU) == 2 * 1000 / 0.5


@pytest.mark.parametrize("content", ["", "[1]", '{"a": "b"}', "not JSON"])
def test_a_cache_that_cannot_be_read_is_measured_anew(content: str, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(flops, "measure_peak", lambda dtype, device: 1e12)
    cache_file().parent.mkdir()
    cache_file().write_text(content)
    assert matmul_peak(torch.float32, CPU) == 1e12


def test_without_a_place_for_the_cache_it_is_measured_each_time(monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    monkeypatch.setattr(flops, "measure_peak", lambda dtype, device: 1e12)
    assert matmul_peak(torch.float32, CPU) == 1e12
