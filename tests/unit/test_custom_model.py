"""The custom GPT is causal, ignores padding, and generates the same tokens with a cache."""

import pytest
import torch

from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM

PAD, EOS = 3, 2


@pytest.fixture(scope="module")
def model() -> CustomGPTForCausalLM:
    torch.manual_seed(0)
    sizes = {"vocab_size": 300, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "ff_dim": 128, "seq_length": 64}
    return CustomGPTForCausalLM(CustomGPTConfig(**sizes, pad_token_id=PAD, eos_token_id=EOS)).eval()


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(4, 300, (2, 10), generator=torch.Generator().manual_seed(1))


def padded(tokens: torch.Tensor, left: int, right: int) -> dict:
    ids = torch.nn.functional.pad(tokens, (left, right), value=PAD)
    mask = torch.nn.functional.pad(torch.ones_like(tokens), (left, right), value=0)
    return {"input_ids": ids, "attention_mask": mask}


def test_later_tokens_do_not_change_earlier_logits(model, tokens):
    changed = tokens.clone()
    changed[:, 7:] = 5
    torch.testing.assert_close(model(changed).logits[:, :7], model(tokens).logits[:, :7])
    assert not torch.allclose(model(changed).logits[:, 7:], model(tokens).logits[:, 7:])


@pytest.mark.parametrize(("left", "right"), [(3, 0), (0, 4)])
def test_padding_does_not_change_the_logits_of_real_tokens(model, tokens, left, right):
    logits = model(**padded(tokens, left, right)).logits[:, left : left + 10]
    torch.testing.assert_close(logits, model(tokens).logits, atol=1e-5, rtol=1e-5)


def test_cached_generation_equals_uncached_also_with_padding(model, tokens):
    options = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None}
    uncached = model.generate(tokens, use_cache=False, **options)
    assert torch.equal(model.generate(tokens, use_cache=True, **options), uncached)
    after_padding = model.generate(**padded(tokens, 5, 0), use_cache=True, **options)
    assert torch.equal(after_padding[:, 5:], uncached)
