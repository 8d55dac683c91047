"""Folders of saved models: which file is cut off, foreign or missing is said before anything is loaded."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import BertConfig, BloomConfig, BloomForCausalLM

from custom_model import CustomGPTConfig, CustomGPTForCausalLM
from helpers import REPOSITORY
from knobs import DataArguments, ModelArguments
from model import check_model, empty_model, load_config, load_model, load_tokenizer

DATA = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
SHARD = "model-00002-of-00002.safetensors"


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """One model, its weights in one file, in two, and as older models have them."""
    folder = tmp_path_factory.mktemp("models")
    model = BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=16, n_layer=1, n_head=2))
    tokenizer = load_tokenizer(ModelArguments("tiny-bloom"), DATA)
    for name, size in (("one", "1GB"), ("two", "100KB"), ("bin", "1GB")):
        model.save_pretrained(folder / name, max_shard_size=size)
        tokenizer.save_pretrained(folder / name)
    (folder / "bin" / "model.safetensors").unlink()
    torch.save(model.state_dict(), folder / "bin" / "pytorch_model.bin")
    assert (folder / "two" / SHARD).is_file()
    return folder


def load(folder: Path):
    """As train.py does."""
    arguments = ModelArguments(str(folder))
    check_model(arguments, empty_model(arguments, DATA))
    return load_model(arguments, DATA, load_tokenizer(arguments, DATA), 1)


@pytest.mark.parametrize("name", ["one", "two", "bin"])
def test_whole_folder_is_loaded(name, saved):
    assert type(load(saved / name)) is BloomForCausalLM


def test_folder_of_the_custom_model_is_loaded(saved, tmp_path):
    sizes = {"vocab_size": 2048, "hidden_size": 8, "num_layers": 1, "num_heads": 1, "ff_dim": 8, "seq_length": 8}
    CustomGPTForCausalLM(CustomGPTConfig(**sizes)).save_pretrained(tmp_path)
    load_tokenizer(ModelArguments("tiny-bloom"), DATA).save_pretrained(tmp_path)
    assert type(load(tmp_path)) is CustomGPTForCausalLM


class Code:
    """What a pickle can do to whoever loads it."""

    def __reduce__(self):
        return os.mkdir, ("loaded",)


def cut(name: str, size: int):
    return lambda folder: os.truncate(folder / name, size)


def text(name: str, content: str):
    return lambda folder: (folder / name).write_text(content)


def with_keys(name: str, **keys: object):
    def change(folder: Path) -> None:
        content = json.loads((folder / name).read_text()) | keys
        (folder / name).write_text(json.dumps(content))

    return change


def without(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def pipe(name: str):
    def change(folder: Path) -> None:
        (folder / name).unlink()
        os.mkfifo(folder / name)

    return change


CONFIG = "config.json"
WEIGHTS = "model.safetensors"
INDEX = "model.safetensors.index.json"
LFS = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"
CODE = {"AutoConfig": "mine.Config", "AutoModelForCausalLM": "mine.Model"}
FAULTS = [
    ("one", CONFIG, "gone", without(CONFIG), "--model_name: the folder IN holds no config.json; give the folder of a"),
    ("one", CONFIG, "cut off", cut(CONFIG, 300), "IN/config.json: line "),
    ("one", CONFIG, "a list", text(CONFIG, "[]"), "IN/config.json: is not a JSON object; give the folder of a saved"),
    ("one", CONFIG, "a pipe", pipe(CONFIG), "IN/config.json: is no regular file; remove it"),
    ("one", CONFIG, "no kind", text(CONFIG, "{}"), "IN/config.json: model_type: is missing; "),
    (
        "one", CONFIG, "unknown kind", with_keys(CONFIG, model_type="foo"),
        "IN/config.json: model_type: is 'foo', which transformers does not know; give the folder of a saved model",
    ),
    (
        "one", CONFIG, "its own code", with_keys(CONFIG, auto_map=CODE, model_type="mine"),
        "IN/config.json: auto_map: asks for code of the folder, which is never run here; take a model that",
    ),
    (
        "one", CONFIG, "quantised", with_keys(CONFIG, quantization_config={"quant_method": "gptq"}),
        "IN/config.json: quantization_config: the weights are quantised, and cannot be trained; ",
    ),
    (
        "one", CONFIG, "encoder", text(CONFIG, json.dumps(BertConfig().to_dict())),
        "--model_name: IN is a bert model, not a causal LM; take one that generates text",
    ),
    ("one", CONFIG, "wrong type", with_keys(CONFIG, hidden_size="x"), "IN/config.json: cannot be used ("),
    ("one", CONFIG, "no model", with_keys(CONFIG, n_head=3), "IN: its config makes no model (ValueError: "),
    ("one", WEIGHTS, "gone", without(WEIGHTS), "IN: holds no weights (model.safetensors); give the folder of a saved"),
    ("one", WEIGHTS, "cut off", cut(WEIGHTS, 70000), f"IN/{WEIGHTS}: is cut off at 70000 bytes (incomplete metadata"),
    ("one", WEIGHTS, "head cut off", cut(WEIGHTS, 50), f"IN/{WEIGHTS}: is cut off at 50 bytes ("),
    ("one", WEIGHTS, "empty", cut(WEIGHTS, 0), f"IN/{WEIGHTS}: is cut off at 0 bytes ("),
    ("one", WEIGHTS, "foreign", text(WEIGHTS, "a" * 999), f"IN/{WEIGHTS}: is no safetensors file ("),
    ("one", WEIGHTS, "pointer", text(WEIGHTS, LFS), f"IN/{WEIGHTS}: is a pointer of Git LFS, not the weights; run git"),
    (
        "one", WEIGHTS, "other shapes", with_keys(CONFIG, vocab_size=4096),
        f"IN/{WEIGHTS}: transformer.word_embeddings.weight is 2048 x 16, config.json makes it 4096 x 16; use weights",
    ),
    (
        "one", WEIGHTS, "another layer", with_keys(CONFIG, n_layer=2),
        f"IN/{WEIGHTS}: holds 17 of the 29 weights that config.json asks for, not transformer.h.1.input_layernorm.w",
    ),
    ("two", WEIGHTS, "shard gone", without(SHARD), f"IN/{SHARD}: is missing, though the index beside it names it; "),
    ("two", WEIGHTS, "shard cut off", cut(SHARD, 5000), f"IN/{SHARD}: is cut off at 5000 bytes ("),
    ("two", WEIGHTS, "index cut off", cut(INDEX, 200), f"IN/{INDEX}: line "),
    ("two", WEIGHTS, "no map", text(INDEX, "{}"), f"IN/{INDEX}: weight_map: is missing, or names no file; "),
    (
        "two", WEIGHTS, "file elsewhere", text(INDEX, '{"weight_map": {"a": "../a"}}'),
        f"IN/{INDEX}: weight_map: '../a' is no file of this folder; ",
    ),
    (
        "bin", WEIGHTS, "bin cut off", cut("pytorch_model.bin", 20000),
        "IN/pytorch_model.bin: is cut off, or was not written by torch.save; ",
    ),
    (
        "bin", WEIGHTS, "bin with code", lambda folder: torch.save({"a": Code()}, folder / "pytorch_model.bin"),
        "IN/pytorch_model.bin: holds other things than tensors, which are never loaded; ",
    ),
    (
        "one", "tokenizer", "gone", without("tokenizer.json", "tokenizer_config.json"),
        "IN: holds no tokenizer (tokenizer.json); save one beside the model, or give --tokenizer_name",
    ),
    (
        "one", "tokenizer", "cut off", cut("tokenizer.json", 30000),
        "IN/tokenizer.json: is cut off or no tokenizer (EOF while parsing",
    ),
    ("one", "tokenizer", "foreign", text("tokenizer.json", "{}"), "IN/tokenizer.json: is cut off or no tokenizer ("),
    ("one", "tokenizer", "a pipe", pipe("tokenizer.json"), "IN/tokenizer.json: is no regular file; "),
    ("one", "tokenizer", "settings cut off", cut("tokenizer_config.json", 99), "IN/tokenizer_config.json: line "),
    (
        "one", "tokenizer", "settings a list", text("tokenizer_config.json", "[]"),
        "IN/tokenizer_config.json: is not a JSON object; ",
    ),
    (
        "one", "tokenizer", "no end of an answer", without("tokenizer_config.json"),
        "--model_name: the tokenizer of IN has no eos_token, by which the model learns to end an answer; name one in",
    ),
]  # fmt: skip


@pytest.mark.parametrize(
    ("model", "change", "beginning"),
    [(model, change, beginning) for model, _, _, change, beginning in FAULTS],
    ids=[f"{file} {what}" for _, file, what, _, _ in FAULTS],
)
def test_file_at_fault_is_named(model, change, beginning, saved, tmp_path, refusal):
    folder = tmp_path / "model"
    shutil.copytree(saved / model, folder)
    change(folder)
    line = refusal(load, folder)
    assert line.startswith(f"error: {beginning}".replace("IN", str(folder)))
    assert list(Path().iterdir()) == [], "code of the folder was run"


def test_folder_is_not_asked_for_weights_that_are_not_used(saved, tmp_path):
    """As --from_scratch and estimate_memory.py do."""
    shutil.copytree(saved / "one", tmp_path / "model")
    without(WEIGHTS)(tmp_path / "model")
    arguments = ModelArguments(str(tmp_path / "model"), from_scratch=True)
    check_model(arguments, empty_model(arguments, DATA))
    assert load_config(SimpleNamespace(model_name=str(tmp_path / "model")), DATA).hidden_size == 16


def test_tokenizer_of_another_folder_is_named_by_its_flag(tmp_path, refusal):
    arguments = ModelArguments("tiny-bloom", tokenizer_name="./gone")
    assert refusal(load_tokenizer, arguments, DATA).startswith("error: --tokenizer_name: there is no folder ./gone; ")


def test_random_weights_are_not_taken_for_those_of_the_hub(saved, tmp_path, refusal):
    """There the files are not checked before; load_model alone stands for that here."""
    folder = tmp_path / "model"
    shutil.copytree(saved / "one", folder)
    with_keys(CONFIG, n_layer=2)(folder)
    arguments = ModelArguments(str(folder))
    line = refusal(load_model, arguments, DATA, load_tokenizer(arguments, DATA), 1)
    weight = "transformer.h.1.input_layernorm.bias"
    assert line.startswith(f"error: --model_name: {folder} has no weights for {weight}, they would be random; take a")
