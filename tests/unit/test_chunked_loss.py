"""The chunked loss has the value and the gradients of transformers' loss over full logits."""

import copy

import pytest
import torch
from transformers import (
    BartConfig,
    BartForCausalLM,
    BloomConfig,
    BloomForCausalLM,
    Gemma2Config,
    Gemma2ForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
)

from config import IGNORED
from models import chunked_loss
from models.chunked_loss import CrossEntropyOfHead, add_label_counts, check_head, use_chunked_loss
from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM

VOCABULARY = 700
BLOOM = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4}
GPT = CustomGPTConfig(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, ff_dim=64, seq_length=64)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Make pieces so small that each tensor has several, and the last one is shorter."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 33)
    monkeypatch.setattr(chunked_loss, "ROW_MULTIPLE", 6)
    monkeypatch.setattr(chunked_loss, "CPU_PIECES", chunked_loss.Pieces(logits=3000, vocabulary=99))


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    untied = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False))
    return {"tied": BloomForCausalLM(BLOOM), "custom-gpt": CustomGPTForCausalLM(GPT), "untied": untied}


def batch(counted: str) -> dict[str, torch.Tensor]:
    """Return four sequences of 40 tokens. counted: the tokens whose labels count in the loss."""
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (4, 40))
    labels = torch.full_like(tokens, IGNORED)
    if counted == "all but padding and a sequence":
        labels[1:, :30] = tokens[1:, :30]
    if counted == "one":
        labels[2, 7] = tokens[2, 7]
    if counted == "none":
        labels[:, 0] = tokens[:, 0]  # no position has the first token as its target
    return {"input_ids": tokens, "labels": labels, "num_items_in_batch": torch.tensor(300)}


def loss_and_gradients(model: torch.nn.Module, inputs: dict, bf16: bool) -> tuple[float, dict]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(**inputs).loss
    (3 * loss).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("counted", ["all but padding and a sequence", "one", "none"])
@pytest.mark.parametrize("kind", models())
@pytest.mark.parametrize(("bf16", "tolerance"), [(False, 1e-5), (True, 2e-2)], ids=["fp32", "bf16"])
def test_loss_and_every_gradient_are_those_of_the_full_logits(kind: str, counted: str, bf16: bool, tolerance: float):
    full = models()[kind]
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    loss, gradients = loss_and_gradients(full, batch(counted), bf16)
    own_batch = batch(counted)
    add_label_counts([own_batch])
    own_loss, own_gradients = loss_and_gradients(chunked, own_batch, bf16)
    assert own_loss == pytest.approx(loss, rel=tolerance / 10)
    assert own_gradients.keys() == gradients.keys()
    for name, gradient in gradients.items():
        # The exact gradient of the keys' bias is 0, because softmax ignores a constant. Only rounding errors remain
        difference = (own_gradients[name] - gradient).norm()
        assert difference <= tolerance * gradient.norm() + tolerance / 100, name


def test_evaluation_gets_the_mean_loss_and_generation_gets_logits():
    full = models()["untied"].eval()
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    inputs = batch("all but padding and a sequence")
    del inputs["num_items_in_batch"]
    with torch.no_grad():
        assert chunked(**inputs).loss.item() == pytest.approx(full(**inputs).loss.item(), rel=1e-6)
        assert torch.equal(chunked(inputs["input_ids"]).logits, full(inputs["input_ids"]).logits)


def test_fp16_keeps_the_small_gradients_of_a_large_vocabulary():
    """The gradient of a token that is not a target is its softmax, here near the smallest numbers of fp16.

    The loss scale is applied only in the backward pass, so it cannot raise the softmax.
    """
    torch.manual_seed(0)
    hidden = torch.randn(100, 16)
    weight = torch.randn(250_880, 16) * 0.05
    targets = torch.arange(100)

    def gradient(dtype: torch.dtype) -> torch.Tensor:
        own_weight = weight.detach().to(dtype).requires_grad_()
        loss = CrossEntropyOfHead.apply(hidden.to(dtype), own_weight, targets, True)
        (loss / 100 * 2**16).backward()
        return own_weight.grad[100:].float()

    exact = gradient(torch.float32)
    assert (gradient(torch.float16) - exact).norm() <= 1e-3 * exact.norm()


def test_a_sum_that_fp16_cannot_hold_is_not_infinite():
    """One token is the target of all positions, and the hidden states are large."""
    hidden, weight = torch.full((200, 16), 300.0).half(), torch.zeros(100, 16).half()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = CrossEntropyOfHead.apply(hidden, weight, torch.zeros(200, dtype=torch.long), True)
    (loss / 200).backward()
    assert weight.grad[0].float() == pytest.approx(torch.full((16,), -297.0), rel=1e-3)


class LargestTensor(torch.utils._python_dispatch.TorchDispatchMode):
    """Record the number of elements of the largest tensor that is created. A view of another tensor does not count."""

    elements = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        result = function(*arguments, **(options or {}))
        given = [each.untyped_storage().data_ptr() for each in arguments if isinstance(each, torch.Tensor)]
        if isinstance(result, torch.Tensor) and result.untyped_storage().data_ptr() not in given:
            self.elements = max(self.elements, result.numel())
        return result


def test_no_tensor_holds_tokens_times_vocabulary():
    model = models()["untied"]
    use_chunked_loss(model)
    with LargestTensor() as largest:
        model(**batch("all but padding and a sequence")).loss.backward()
    assert largest.elements <= 36 * VOCABULARY, "only the logits of one chunk may exist at a time"


def test_a_frozen_head_gets_no_gradient_and_no_memory_for_one():
    """With LoRA, the head of bloom-560m would need 980 MiB for a gradient that nobody uses."""
    torch.manual_seed(0)
    weight = torch.randn(5000, 16)
    values = torch.randn(10, 16)

    def backward(trainable: bool) -> tuple[torch.Tensor, torch.Tensor | None, int]:
        hidden, head = values.clone().requires_grad_(), weight.clone().requires_grad_(trainable)
        with LargestTensor() as largest:
            CrossEntropyOfHead.apply(hidden, head, torch.arange(10), True).backward()
        return hidden.grad, head.grad, largest.elements

    expected, _, with_gradient = backward(trainable=True)
    gradient, no_gradient, without = backward(trainable=False)
    assert torch.equal(gradient, expected)
    assert no_gradient is None
    assert without < weight.numel() <= with_gradient


def model_with_two_layer_head() -> torch.nn.Module:
    model = models()["untied"]
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, VOCABULARY))
    return model


def model_with_own_loss() -> torch.nn.Module:
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32}
    return BartForCausalLM(BartConfig(**sizes, decoder_attention_heads=2))


@pytest.mark.parametrize(
    ("model", "what"),
    [
        (
            model_with_two_layer_head,
            "needs one linear layer without bias as head, LlamaForCausalLM has a different one",
        ),
        (model_with_own_loss, "is wrong for BartForCausalLM, which has a loss of its own"),
    ],
)
def test_a_head_or_loss_that_cannot_be_chunked_is_refused(model, what, refusal):
    assert refusal(check_head, model()) == f"error: --loss: chunked {what}; use --loss full"


def test_a_model_that_changes_its_logits_is_refused_in_the_first_step(refusal):
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes))
    use_chunked_loss(model)
    line = refusal(lambda: model(**batch("one")))
    assert (
        line
        == "error: --loss: chunked is wrong for Gemma2ForCausalLM, which scales or caps its logits; use --loss full"
    )
