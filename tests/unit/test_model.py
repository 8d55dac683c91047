"""Models and tokenizers by name, folder or size; what would train something else than asked is refused."""

import json
import os
import shutil
from pathlib import Path

import huggingface_hub.constants
import pytest
import torch
from transformers import (
    BartConfig,
    BertConfig,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    PreTrainedConfig,
    ViTConfig,
)

from custom_model import CustomGPTConfig, CustomGPTForCausalLM
from helpers import REPOSITORY
from knobs import DataArguments, ModelArguments
from model import BLOOM_SIZES, check_model, count_parameters, empty_model, load_config, load_model, load_tokenizer

DATA = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
TINY = ModelArguments("tiny-bloom")


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No test here may wait for a network."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)


@pytest.fixture(scope="session")
def tokenizer():
    return load_tokenizer(TINY, DATA)


def test_tiny_bloom_is_small_in_fp32_and_the_same_for_a_seed(tokenizer):
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
    assert count_parameters(empty_model(ModelArguments(name, from_scratch=True), DATA)) == size
    assert name in BLOOM_SIZES


def test_from_scratch_without_the_models_tokenizer_says_that_it_trains_one(capsys):
    tokenizer = load_tokenizer(ModelArguments("bigscience/bloom-560m", from_scratch=True), DATA)
    assert len(tokenizer) == 2048
    assert "no tokenizer of bigscience/bloom-560m here: training one of 2048 tokens on" in capsys.readouterr().out


def test_name_that_is_neither_local_nor_cached_is_refused(refusal):
    def load(name: str):
        return load_tokenizer(ModelArguments(name), DATA)

    line = refusal(load, "nobody/nothing")
    assert line.startswith("error: --model_name: nobody/nothing is no local path, not in the cache, and there is no")
    assert f"python scripts/prefetch.py --model_name nobody/nothing --dataset {DATA.dataset}" in line
    assert refusal(load, "./gone").startswith("error: --model_name: there is no folder ./gone; ")
    other = ModelArguments("tiny-bloom", tokenizer_name="./gone")
    assert refusal(load_tokenizer, other, DATA).startswith("error: --tokenizer_name: there is no folder ./gone; ")


# Folders


@pytest.fixture(scope="session")
def saved(tmp_path_factory, tokenizer):
    """One model, its weights in one file, in two, in 16 bit, and as older models have them."""
    folder = tmp_path_factory.mktemp("models")
    model = BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=16, n_layer=1, n_head=2))
    for name in ("one", "two", "bin", "half"):
        tokenizer.save_pretrained(folder / name)
        model.save_pretrained(folder / name, max_shard_size="100KB" if name == "two" else "1GB")
    model.to(torch.float16).save_pretrained(folder / "half")
    (folder / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    assert (folder / "two" / "model-00002-of-00002.safetensors").is_file()
    return folder


def load(folder: Path):
    """As train.py does."""
    arguments = ModelArguments(str(folder))
    skeleton = empty_model(arguments, DATA)
    tokenizer = load_tokenizer(arguments, DATA)
    check_model(skeleton, tokenizer, 512)
    return load_model(arguments, DATA, tokenizer, 1)


@pytest.mark.parametrize("name", ["one", "two", "bin", "half"])
def test_saved_model_is_loaded_in_fp32(name, saved):
    model = load(saved / name)
    assert type(model) is BloomForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def test_folder_of_the_custom_model_is_loaded(tokenizer, tmp_path):
    sizes = {"vocab_size": 2048, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "ff_dim": 8, "seq_length": 512}
    CustomGPTForCausalLM(CustomGPTConfig(**sizes)).save_pretrained(tmp_path)
    tokenizer.save_pretrained(tmp_path)
    assert type(load(tmp_path)) is CustomGPTForCausalLM


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def with_keys(name: str, **keys: object):
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | keys
        (folder / name).write_text(json.dumps(content))

    return change


def without(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def of_kind(config: PreTrainedConfig):
    return lambda folder: config.save_pretrained(folder)


CONFIG, WEIGHTS, TOKENIZER = "config.json", "model.safetensors", "tokenizer.json"
LOADED = "--model_name: IN cannot be loaded ("
SHAPE = "of the shape that its config.json asks for; take config.json and weights of one model"
FAULTS = {
    "no config": (without(CONFIG), LOADED),
    "config cut off": (cut(CONFIG, 300), f"{LOADED}It looks like the config file at 'IN/config.json' is not"),
    "encoder": (of_kind(BertConfig()), "--model_name: IN is a bert model, not a causal LM; take one that"),
    "images": (of_kind(ViTConfig()), "--model_name: IN is a vit model, not a causal LM; take one that"),
    "no weights": (without(WEIGHTS), f"{LOADED}Error no file named model.safetensors"),
    "weights that git lfs did not fetch": (
        lambda folder: (folder / WEIGHTS).write_text("version https://git-lfs.github.com/spec/v1\n"),
        f"{LOADED}Error while deserializing header: header too large",
    ),
    "weights of another shape": (
        with_keys(CONFIG, vocab_size=4096),
        f"--model_name: IN has no transformer.word_embeddings.weight {SHAPE}",
    ),
    "a layer without weights": (
        with_keys(CONFIG, n_layer=2),
        f"--model_name: IN has no transformer.h.1.input_layernorm.bias {SHAPE}",
    ),
    "no tokenizer": (
        without(TOKENIZER, "tokenizer_config.json"),
        f"{LOADED}Couldn't instantiate the backend tokenizer",
    ),
    "no end of an answer": (
        without("tokenizer_config.json"),
        "--model_name: the tokenizer of IN has no eos_token, by which the model learns to end an answer; name one in",
    ),
}


@pytest.mark.parametrize(("change", "beginning"), FAULTS.values(), ids=FAULTS)
def test_broken_folder_is_refused_in_one_line(change, beginning, saved, tmp_path, refusal):
    folder = tmp_path / "model"
    shutil.copytree(saved / "one", folder)
    change(folder)
    line = refusal(load, folder)
    assert line.startswith(f"error: {beginning}".replace("IN", str(folder)))


def test_tokenizer_that_transformers_makes_of_nothing_is_refused(tmp_path, refusal):
    """For GPT-2, OPT, Qwen and others: without its file, every text has no tokens."""
    GPT2Config(n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    line = refusal(load_tokenizer, ModelArguments(str(tmp_path)), DATA)
    assert line == (
        f"error: --model_name: {tmp_path} holds no tokenizer; save one beside the model, or give --tokenizer_name"
    )


def test_folder_is_not_asked_for_weights_that_are_not_used(saved, tokenizer, tmp_path):
    shutil.copytree(saved / "one", tmp_path / "model")
    without(WEIGHTS)(tmp_path / "model")
    arguments = ModelArguments(str(tmp_path / "model"), from_scratch=True)
    assert load_model(arguments, DATA, tokenizer, 1).config.hidden_size == 16


def test_tokenizer_that_is_larger_than_the_model_is_refused(saved, tokenizer, tmp_path, refusal):
    arguments = ModelArguments("custom-gpt", vocab_size=100)
    line = refusal(check_model, empty_model(arguments, DATA), tokenizer, 512)
    assert line.startswith("error: --model_name: its tokenizer has 2048 tokens, the model 100; use a matching pair")


SMALL = {"vocab_size": 2048, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LEARNED = {
    "GPT-2": GPT2Config(**SMALL, n_positions=256),
    "OPT": OPTConfig(**SMALL, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=256),
    "BART": BartConfig(vocab_size=2048, d_model=16, decoder_layers=1, decoder_ffn_dim=16, max_position_embeddings=256),
    "custom": CustomGPTConfig(**SMALL, ff_dim=16, seq_length=256),
}


@pytest.mark.parametrize("config", LEARNED.values(), ids=LEARNED)
def test_texts_that_are_longer_than_the_learned_positions_are_refused(config, tokenizer, tmp_path, refusal):
    config.save_pretrained(tmp_path)
    model = empty_model(ModelArguments(str(tmp_path)), DATA)
    check_model(model, tokenizer, 256)
    line = refusal(check_model, model, tokenizer, 257)
    assert line.startswith("error: --max_length: 257 is more than the 256 positions of the model; lower it to 256, or")


@pytest.mark.parametrize(
    "config",
    [LlamaConfig(**SMALL, intermediate_size=16, max_position_embeddings=2048), BloomConfig(**SMALL)],
    ids=["rotary", "alibi"],
)
def test_positions_that_are_computed_have_no_end(config, tokenizer, tmp_path):
    """Also where the table of words has as many rows as the model says it has positions."""
    config.save_pretrained(tmp_path)
    check_model(empty_model(ModelArguments(str(tmp_path)), DATA), tokenizer, 4096)
    assert load_config(ModelArguments(str(tmp_path)), DATA).vocab_size == 2048
