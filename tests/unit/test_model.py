"""Tests of models and tokenizers by name, folder or size. A model that would not train as requested is rejected."""

import json
import os
import re
import shutil
import tempfile
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from transformers import (
    BertConfig,
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    LlamaConfig,
    OPTConfig,
    Qwen2Config,
)

from config import DataArguments, ModelArguments
from data_loader import find_files, tokenizer_key
from guard.preconditions import check_saving
from helpers import REPOSITORY, as_nobody, only_root
from model import DrawOnCPU, build_meta_model, check_model, count_parameters, load_model, load_tokenizer, share_weights
from models.custom_model import CustomGPTConfig

DATA = DataArguments(dataset=str(REPOSITORY / "data" / "squad_sample.json"))
TINY = ModelArguments("tiny-bloom")


def test_tiny_bloom_is_small_in_fp32_and_depends_on_the_seed(tiny_tokenizer):
    one, again, other = (load_model(TINY, tiny_tokenizer, seed) for seed in (1, 1, 2))
    assert count_parameters(one) == sum(p.numel() for p in one.parameters()) < 500_000
    assert {p.dtype for p in one.parameters()} == {torch.float32}
    states = [model.state_dict()["transformer.h.1.mlp.dense_h_to_4h.weight"] for model in (one, again, other)]
    assert torch.equal(states[0], states[1])
    assert not torch.equal(states[0], states[2])


# The numbers of parameters are from the models' pages on the Hub
@pytest.mark.parametrize(("name", "size"), [("bigscience/bloom-560m", 559214592), ("bigscience/bloom-3b", 3002557440)])
def test_from_scratch_has_the_size_of_the_named_model_without_a_download(name, size):
    assert count_parameters(build_meta_model(ModelArguments(name, from_scratch=True))) == size


def test_the_error_for_a_missing_folder_names_its_flag(refusal):
    def line(name: str, tokenizer_name: str | None = None) -> str:
        return refusal(load_tokenizer, ModelArguments(name, tokenizer_name=tokenizer_name), DATA)

    assert line("./gone").startswith("error: --model_name: there is no folder ./gone; ")
    assert line("output/gone").startswith("error: --model_name: there is no folder output/gone; ")
    assert line("tiny-bloom", "./gone").startswith("error: --tokenizer_name: there is no folder ./gone; ")


def test_a_path_relative_to_the_repository_gets_an_absolute_path_as_advice(tmp_path, monkeypatch, refusal):
    """A job runs in its own folder, where such a path does not exist."""
    monkeypatch.chdir(tmp_path)
    data = "data/squad_sample.json"
    absolute = f"there is no {{}} in {tmp_path}; give an absolute path: {REPOSITORY}/{{}}"
    assert refusal(load_tokenizer, ModelArguments("data"), DATA) == f"error: --model_name: {absolute}".format(
        *["data"] * 2
    )
    assert refusal(find_files, data) == f"error: --dataset: {absolute}".format(data, data)


# Folders


@pytest.fixture
def folder(tmp_path, tiny_tokenizer):
    """The folder of a model saved in 16-bit precision."""
    model = BloomForCausalLM(BloomConfig(vocab_size=2048, hidden_size=16, n_layer=1, n_head=2))
    model.to(torch.float16).save_pretrained(tmp_path / "model")
    tiny_tokenizer.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def load(folder: Path):
    """Load a model as train.py does, with all checks before the weights are loaded."""
    arguments = ModelArguments(str(folder))
    meta_model = build_meta_model(arguments)
    tokenizer = load_tokenizer(arguments, DATA)
    check_model(meta_model, tokenizer, 512)
    return load_model(arguments, tokenizer, 1)


def load_to_answer(folder: Path):
    """Load a model as evaluate.py and ask.py do."""
    arguments = ModelArguments(str(folder))
    tokenizer = load_tokenizer(arguments, DATA)
    check_model(load_model(arguments, tokenizer, 1), tokenizer, 512)


def test_saved_model_is_loaded_in_fp32(folder):
    model = load(folder)
    assert type(model) is BloomForCausalLM
    assert {p.dtype for p in model.parameters()} == {torch.float32}


def remove_files(*names: str):
    return lambda folder: [(folder / name).unlink() for name in names]


def replace_in(path: Path, old: str, new: str) -> None:
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))


LFS = "version https://git-lfs.github.com/spec/v1\n"
FAULTS = {
    "config cut off": (
        lambda folder: os.truncate(folder / "config.json", 300),
        "IN cannot be loaded (It looks like the config file at 'IN/config.json' is not",
    ),
    "encoder": (
        lambda folder: BertConfig().save_pretrained(folder),
        "IN is a bert model, not a causal LM; use a model that generates text",
    ),
    "weights that git lfs did not fetch": (
        lambda folder: (folder / "model.safetensors").write_text(LFS),
        "IN/model.safetensors: is a pointer of Git LFS, not the file itself; run git lfs pull",
    ),
    "a tokenizer that git lfs did not fetch": (
        lambda folder: (folder / "tokenizer.json").write_text(LFS),
        "IN/tokenizer.json: is a pointer of Git LFS, not the file itself; run git lfs pull",
    ),
    "truncated weights": (
        lambda folder: os.truncate(folder / "model.safetensors", 9000),
        "IN/model.safetensors cannot be loaded (Error while deserializing header: incomplete metadata, file not fully "
        "covered); copy or download this file again",
    ),
    "a layer without weights": (
        lambda folder: replace_in(folder / "config.json", '"n_layer": 1', '"n_layer": 2'),
        "the weights of IN and its config.json differ in transformer.h.1.input_layernorm.bias; use config.json and",
    ),
    "no tokenizer": (
        remove_files("tokenizer.json", "tokenizer_config.json"),
        "IN cannot be loaded (Couldn't instantiate the backend tokenizer",
    ),
    "a tokenizer of another version": (
        lambda folder: replace_in(folder / "tokenizer.json", '"type": "BPE"', '"type": "of the future"'),
        "IN cannot be loaded (",
    ),
    "a configuration with a wrong type": (
        lambda folder: replace_in(folder / "config.json", '"n_layer": 1', '"n_layer": "one"'),
        "IN cannot be loaded (",
    ),
    "only adapters": (
        lambda folder: (folder / "config.json").rename(folder / "adapter_config.json"),
        "IN has no model, only adapters in PEFT's format; add them to their base with PEFT's merge_and_unload, or",
    ),
    "a folder of adapters, without a model": (
        lambda folder: [
            (folder / "adapter").mkdir(),
            (folder / "config.json").rename(folder / "adapter/adapter_config.json"),
        ],
        "IN has no model, only adapters in PEFT's format; add them to their base with PEFT's merge_and_unload, or",
    ),
    "a checkpoint of a run with LoRA": (
        lambda folder: save_file({"dense.lora_a": torch.zeros(2)}, folder / "model.safetensors"),
        "IN is a checkpoint of a training run with LoRA, whose weights do not contain the adapters; give the output",
    ),
    "only checkpoints": (
        lambda folder: (folder / "config.json").rename((folder / "checkpoint-4").mkdir() or folder / "checkpoint-4/x"),
        "IN has no model, only checkpoints (checkpoint-4); complete its run with --resume_from_checkpoint IN",
    ),
    "quantised weights": (
        lambda folder: replace_in(folder / "config.json", "{", '{"quantization_config": {"quant_method": "gptq"},'),
        "IN has quantised weights (quantization_config in its config.json), which cannot be trained; use the model",
    ),
    "no end of an answer": (
        remove_files("tokenizer_config.json"),
        "the tokenizer of IN has no eos_token, by which the model learns to end an answer; name one in its tokenizer",
    ),
}


@pytest.mark.promise("your own model and data: from a table to a model that answers")
@pytest.mark.parametrize("program", [load, load_to_answer])
@pytest.mark.parametrize("fault", FAULTS)
def test_broken_folder_is_refused_in_one_line(fault, program, folder, refusal):
    change, line = FAULTS[fault]
    change(folder)
    source = "" if re.match(r"IN/\S+: ", line) else "--model_name: "
    assert refusal(program, folder).startswith(f"error: {source}{line}".replace("IN", str(folder)))


@only_root
@pytest.mark.parametrize("place", ["model/model.safetensors", "model", "."])
def test_a_private_model_of_another_user_is_named(place, folder, refusal):
    """safetensors 0.8 lets only the owner read what it writes. A home directory may be closed to others."""
    load(folder)  # imports all modules, because another user may not read them
    with tempfile.TemporaryDirectory() as home:
        model = shutil.copytree(folder, Path(home) / "model")
        for path in (Path(home), model, *model.glob("*.json")):  # the tests may run with umask 077
            path.chmod(path.stat().st_mode | 0o055)
        before = os.umask(0o022)
        share_weights(model)
        os.umask(before)
        with as_nobody():
            load(model)
        (Path(home) / place).chmod(0o600)
        with as_nobody():
            line = refusal(load, model, code=3)
    named = model if place == "." else Path(home) / place
    assert line.startswith(f"error: {named}: may not be read by you; ask its owner to run chmod -R a+rX on the folder")


def test_a_model_that_could_not_be_saved_is_refused_or_mended_before_training(folder, tiny_tokenizer, refusal):
    """transformers reads such a file from the Hub, but a save would end the run after its first epoch."""
    sampling = {"temperature": 0.6, "top_p": 0.9}
    (folder / "generation_config.json").write_text(json.dumps(sampling))
    model = load(folder)
    check_saving(model, tiny_tokenizer)
    model.save_pretrained(folder / "saved")
    saved = json.loads((folder / "saved/generation_config.json").read_text())
    assert saved | sampling | {"do_sample": True} == saved
    model.config.trained_by = object()
    assert refusal(check_saving, model, tiny_tokenizer).startswith("error: --model_name: cannot be saved (")


def test_an_empty_tokenizer_created_by_transformers_is_refused(tmp_path, refusal):
    """For GPT-2, OPT, Qwen and others, transformers creates an empty tokenizer if the file is missing.

    With it, every text would have no tokens.
    """
    GPT2Config(n_embd=8, n_layer=1, n_head=1).save_pretrained(tmp_path)
    line = refusal(load_tokenizer, ModelArguments(str(tmp_path)), DATA)
    assert line == (
        f"error: --model_name: {tmp_path} contains no tokenizer; save one next to the model, or give --tokenizer_name"
    )


def test_a_saved_tokenizer_keeps_its_rules_next_to_any_model(tiny_tokenizer, tmp_path):
    """AutoTokenizer would split digits next to a Qwen2, so the saved model would get tokens it was not trained on."""
    Qwen2Config(**SMALL).save_pretrained(tmp_path)
    tiny_tokenizer.save_pretrained(tmp_path)
    loaded = load_tokenizer(ModelArguments(str(tmp_path)), DATA)
    assert loaded.tokenize("SLURM_PROCID 32") == tiny_tokenizer.tokenize("SLURM_PROCID 32")
    assert tokenizer_key(loaded) == tokenizer_key(tiny_tokenizer)


SMALL = {"vocab_size": 2048, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
LEARNED = {
    "GPT-2": GPT2Config(**SMALL, n_positions=256),
    "OPT": OPTConfig(**SMALL, ffn_dim=16, word_embed_proj_dim=16, max_position_embeddings=256),
    "custom": CustomGPTConfig(**SMALL, ff_dim=16, seq_length=256),
}


@pytest.mark.parametrize("config", LEARNED.values(), ids=LEARNED)
def test_texts_longer_than_the_learned_positions_are_refused(config, tiny_tokenizer, tmp_path, refusal):
    config.save_pretrained(tmp_path)
    model = build_meta_model(ModelArguments(str(tmp_path)))
    check_model(model, tiny_tokenizer, 256)
    line = refusal(check_model, model, tiny_tokenizer, 257)
    assert line.startswith("error: --max_length: 257 is more than the 256 positions of the model; lower it to 256, or")


def test_computed_positions_have_no_limit(tiny_tokenizer, tmp_path):
    """The embedding of the tokens has max_position_embeddings rows, but it is not a table of positions."""
    LlamaConfig(**SMALL, intermediate_size=16, max_position_embeddings=2048).save_pretrained(tmp_path)
    check_model(build_meta_model(ModelArguments(str(tmp_path))), tiny_tokenizer, 4096)


def test_random_weights_of_a_gpu_are_drawn_on_the_cpu():
    """With ZeRO-3 a GPU has the weights when they are drawn. The numbers must be those of the other strategies."""
    states = []
    for device in ("cpu", "meta"):  # meta stands for a GPU: it draws nothing from the generator of the CPU
        torch.manual_seed(0)
        with DrawOnCPU():
            torch.nn.init.normal_(torch.empty(3, 5, device=device))
            torch.nn.init.kaiming_uniform_(torch.empty(3, 5, device=device))
        states.append(torch.get_rng_state())
    assert torch.equal(*states)
