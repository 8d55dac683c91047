"""Tests of models other than tiny-bloom: a Llama without a pad token, and the custom GPT."""

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

from helpers import REPOSITORY

FEW = {"TRAIN_SIZE": 16, "EVAL_SIZE": 5, "NUM_EPOCHS": 1, "MAX_LENGTH": 512, "PADDING": "longest", "MODEL_NAME": ""}


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


@pytest.mark.promise("any causal language model, any SQuAD file")
def test_llama_without_a_pad_token(train, workplace):
    tokenizer = small_tokenizer(bos_token="<s>", eos_token="</s>")
    assert tokenizer.pad_token is None
    sizes = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    special = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    folder = workplace / "my-llama"
    before = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes, **special))
    before.save_pretrained(folder)
    tokenizer.save_pretrained(folder)

    trained = train("llama", "--model_name", "./my-llama", **FEW | {"EM_F1": "True"})
    # An untrained model has a loss of log(600) = 6.4. A loss below half of this would mean that the loss includes
    # padding, which is easy to predict.
    assert 3 < trained.losses[0] < 6.5
    assert 0 <= trained.record["f1"] <= 100
    saved = AutoModelForCausalLM.from_pretrained(trained.output)
    assert type(saved) is LlamaForCausalLM
    assert saved.config.pad_token_id == saved.config.eos_token_id == tokenizer.eos_token_id
    assert not torch.equal(saved.lm_head.weight, before.lm_head.weight)
