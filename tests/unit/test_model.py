"""Models and tokenizers by name, folder or size; what is neither is refused."""

import huggingface_hub.constants
import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

import model
from helpers import REPOSITORY
from knobs import DataArguments, ModelArguments
from model import BLOOM_SIZES, count_parameters, load_config, load_model, load_tokenizer

DATA = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
TINY = ModelArguments("tiny-bloom")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test here may wait for a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


def test_tiny_bloom_is_small_in_fp32_and_the_same_for_a_seed():
    tokenizer = load_tokenizer(TINY, DATA)
    one, again, other = (load_model(TINY, DATA, tokenizer, seed) for seed in (1, 1, 2))
    assert count_parameters(one) == sum(p.numel() for p in one.parameters()) < 500_000
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    states = [model.state_dict()["transformer.h.1.mlp.dense_h_to_4h.weight"] for model in (one, again, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])
    assert (one.config.pad_token_id, one.generation_config.eos_token_id) == (3, 2)


# parameters as the Hub's pages of these models give them
@pytest.mark.parametrize(("name", "size"), [("bigscience/bloom-560m", 559214592), ("bigscience/bloom-3b", 3002557440)])
def test_from_scratch_has_the_size_of_the_named_model_without_a_download(name, size):
    with torch.device("meta"):
        model = BloomForCausalLM(load_config(ModelArguments(name, from_scratch=True), DATA))
    assert count_parameters(model) == size
    assert name in BLOOM_SIZES


def test_from_scratch_without_the_models_tokenizer_says_that_it_trains_one(capsys):
    tokenizer = load_tokenizer(ModelArguments("bigscience/bloom-560m", from_scratch=True), DATA)
    assert len(tokenizer) == 2048
    assert "no tokenizer of bigscience/bloom-560m here: training one of 2048 tokens on" in capsys.readouterr().out


def test_saved_half_precision_model_is_trained_in_fp32(tmp_path):
    config = BloomConfig(vocab_size=2048, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).to(torch.float16).save_pretrained(tmp_path / "model")
    tokenizer = load_tokenizer(TINY, DATA)
    tokenizer.save_pretrained(tmp_path / "model")
    arguments = ModelArguments(str(tmp_path / "model"))
    model = load_model(arguments, DATA, load_tokenizer(arguments, DATA), 1)
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_weights_that_no_memory_holds_are_one_line(monkeypatch, refusal):
    def refuse(config, seed):
        torch.empty(2**62, dtype=torch.uint8)  # more than any address

    monkeypatch.setattr(model, "random_model", refuse)
    line = refusal(load_model, TINY, DATA, load_tokenizer(TINY, DATA), 1, code=3)
    assert line.startswith("error: --model_name: the weights of tiny-bloom need more memory than ")


def test_tokenizer_that_is_larger_than_the_model_is_refused(tmp_path, refusal):
    config = BloomConfig(vocab_size=100, hidden_size=16, n_layer=1, n_head=2)
    BloomForCausalLM(config).save_pretrained(tmp_path)
    arguments = ModelArguments(str(tmp_path))
    line = refusal(load_model, arguments, DATA, load_tokenizer(TINY, DATA), 1)
    assert line == "error: --model_name: its tokenizer has 2048 tokens, the model 100; use a matching pair"


def test_name_that_is_neither_local_nor_cached_is_refused(refusal):
    def load(name: str):
        return load_tokenizer(ModelArguments(name), DATA)

    line = refusal(load, "nobody/nothing")
    assert line.startswith("error: --model_name: nobody/nothing is no local path, not in the cache, and there is no")
    assert f"python scripts/prefetch.py --model_name nobody/nothing --dataset {DATA.dataset}" in line
    assert refusal(load, "./gone").startswith("error: --model_name: there is no folder ./gone; ")
