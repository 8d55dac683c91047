"""What a knob says is what runs: precision, audit, sampling, and models other than tiny-bloom."""

import json
import re

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    BloomConfig,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from config import cpu_has_bf16
from helpers import REPOSITORY, Finished, patched, run
from runs import uses

FEW = {"TRAIN_SIZE": 16, "EVAL_SIZE": 5, "NUM_EPOCHS": 1}


@pytest.mark.skipif(not cpu_has_bf16(), reason="this CPU has no bf16 of its own")
@uses("bf16_plain", "bf16_zero2")
def test_bf16(run: Finished, table):
    assert run.record["knobs"]["precision"] == {"requested": "bf16", "effective": "bf16"}
    assert re.search(r"^precision +bf16 +bf16$", run.log, re.MULTILINE), run
    assert run.effective("strategy") == ("plain" if run.job_id == "bf16_plain" else "DeepSpeed ZeRO-2")
    differences = [abs(a - b) for a, b in zip(run.losses, table("plain").losses, strict=True)]
    assert max(differences) < 0.1
    # bf16 keeps 8 bits: the very losses of fp32 would mean that fp32 ran
    assert max(differences) > 1e-6
    weights = AutoModelForCausalLM.from_pretrained(run.output, dtype="auto")
    assert weights.dtype == (torch.float32 if run.job_id == "bf16_plain" else torch.bfloat16)


@pytest.mark.parametrize("arguments", [(), ("--deepspeed", "ds_configs/zero1.json")])
def test_run_that_would_not_be_the_requested_one_is_stopped(workplace, arguments: tuple):
    script = patched(
        workplace,
        "wrong_batch",
        "from training import audit\naudit.effective_batch = lambda trainer, engine: (4, 1, 1)",
    )
    name = f"audit {len(arguments)}"
    stopped = run(workplace, name, *arguments, script=script, code=3)
    assert stopped.error_lines == [
        "error: knob audit: gradient accumulation: 2 was requested, 1 is what would run; correct the flag or the config"
    ]
    assert (stopped.record["status"], stopped.record["exit_code"]) == ("failed", 3)
    assert stopped.record["knobs"]["global batch"] == {"requested": 8, "effective": 4}
    assert "eval" not in stopped.record, "no step was done"
    assert not list(stopped.output.rglob("*.safetensors"))


PRINT_LENGTHS = """
import data_loader

def printing(tokenizer, data_args, original=data_loader.collator):
    collate = original(tokenizer, data_args)
    call = type(collate).__call__

    def with_lengths(self, rows, return_tensors=None):
        print("BATCH", *(len(row["input_ids"]) for row in rows), flush=True)
        return call(self, rows, return_tensors)

    type(collate).__call__ = with_lengths
    return collate

data_loader.collator = printing
"""


def test_group_by_length_puts_like_lengths_together(workplace):
    script = patched(workplace, "lengths", PRINT_LENGTHS)
    arguments = ("--train_sampling_strategy", "group_by_length", "--eval_strategy", "no")
    grouped = run(workplace, "grouped", *arguments, script=script, NUM_EPOCHS=1, PADDING="longest")
    assert grouped.record["settings"]["train_sampling_strategy"] == "group_by_length"
    batches = [[int(n) for n in lengths.split()] for lengths in re.findall(r"BATCH ([\d ]+)", grouped.log)]
    assert [len(batch) for batch in batches] == [4] * 16
    # 64 lengths from 127 to 194 in 16 batches: about 4 between the longest and the shortest when sorted, 30 at random
    spread = sum(max(batch) - min(batch) for batch in batches) / len(batches)
    assert spread < 10, batches


def small_tokenizer(**special_tokens: str) -> PreTrainedTokenizerFast:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=600, special_tokens=list(special_tokens.values()), initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator([(REPOSITORY / "data" / "squad_sample.json").read_text(encoding="utf-8")], trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special_tokens)


def test_llama_without_a_pad_token(workplace):
    tokenizer = small_tokenizer(bos_token="<s>", eos_token="</s>")
    assert tokenizer.pad_token is None
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=2,
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
    )
    folder = workplace / "my-llama"
    LlamaForCausalLM(config).save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    options = FEW | {"MODEL_NAME": "", "EM_F1": "True", "MAX_LENGTH": 512, "PADDING": "longest"}
    trained = run(workplace, "llama", "--model_name", "./my-llama", **options)
    # half of log(600): it has learned something, and padding was not part of it
    assert 3 < trained.losses[0] < 6.5
    assert 0 <= trained.record["f1"] <= 100
    saved = AutoModelForCausalLM.from_pretrained(trained.output)
    assert type(saved) is LlamaForCausalLM
    assert saved.config.pad_token_id == saved.config.eos_token_id == tokenizer.eos_token_id
    before = LlamaForCausalLM.from_pretrained(folder)
    assert not torch.equal(saved.lm_head.weight, before.lm_head.weight)


def test_from_scratch_needs_a_config_and_a_tokenizer_only(workplace):
    tokenizer = small_tokenizer(unk_token="<unk>", bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    folder = workplace / "architecture"
    BloomConfig(vocab_size=len(tokenizer), hidden_size=48, n_layer=3, n_head=4).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    assert not list(folder.glob("*.safetensors"))
    options = FEW | {"MODEL_NAME": "", "MAX_LENGTH": 512, "PADDING": "longest"}
    trained = run(workplace, "scratch", "--model_name", "architecture", "--from_scratch", **options)
    saved = json.loads((trained.output / "config.json").read_text())
    assert (saved["hidden_size"], saved["n_layer"]) == (48, 3)
    model = AutoModelForCausalLM.from_pretrained(trained.output)
    assert sum(p.numel() for p in model.parameters()) == trained.record["parameters"]
    assert len(AutoTokenizer.from_pretrained(trained.output)) == len(tokenizer)
    assert trained.losses[0] < 6.5
