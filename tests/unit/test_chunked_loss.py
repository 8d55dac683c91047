"""Loss and gradients without logits, against those of transformers, which have them all."""

import copy

import pytest
import torch
import torch.nn.functional as F
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

from custom_model import CustomGPTConfig, CustomGPTForCausalLM
from data_loader import IGNORED
from errors import WorkshopError
from training import chunked_loss
from training.chunked_loss import CrossEntropyOfHead, check_head, computes_loss_in_head, use_chunked_loss

VOCABULARY = 700
BLOOM = BloomConfig(vocab_size=VOCABULARY, hidden_size=32, n_layer=2, n_head=4)
LLAMA = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
LLAMA |= {"num_attention_heads": 4}
GPT = CustomGPTConfig(vocab_size=VOCABULARY, hidden_size=32, num_layers=2, num_heads=4, ff_dim=64, seq_length=64)


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Several chunks, blocks and slices, none of which comes out even."""
    monkeypatch.setattr(chunked_loss, "CHUNK", 33)
    monkeypatch.setattr(chunked_loss, "ROW_MULTIPLE", 6)
    monkeypatch.setattr(chunked_loss, "CPU_PIECES", chunked_loss.Pieces(logits=3000, vocabulary=99))


def models() -> dict[str, torch.nn.Module]:
    torch.manual_seed(0)
    untied = LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=False))
    return {"tied": BloomForCausalLM(BLOOM), "custom-gpt": CustomGPTForCausalLM(GPT), "untied": untied}


def batch(labels: str) -> dict[str, torch.Tensor]:
    """Four sequences of 40 tokens."""
    torch.manual_seed(1)
    tokens = torch.randint(0, VOCABULARY, (4, 40))
    target = tokens.clone()
    if labels == "one sequence ignored":
        target[1] = IGNORED
    if labels == "one token counts":
        target[:] = IGNORED
        target[2, 7] = tokens[2, 7]
    if labels in ("padded", "one sequence ignored"):
        target[:, 30:] = IGNORED
    if labels == "the first label alone":  # the target of no position
        target[:, 1:] = IGNORED
    return {"input_ids": tokens, "labels": target}


def loss_and_gradients(model: torch.nn.Module, inputs: dict, bf16: bool = False) -> tuple[float, dict]:
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
        loss = model(**inputs).loss
    (3 * loss).backward()
    return loss.item(), {name: p.grad.clone() for name, p in model.named_parameters()}


@pytest.mark.parametrize("labels", ["all", "padded", "one sequence ignored", "one token counts"])
@pytest.mark.parametrize("kind", models())
def test_loss_and_every_gradient_are_those_of_the_full_logits(kind: str, labels: str):
    full = models()[kind]
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    inputs = batch(labels)
    for number in ({}, {"num_items_in_batch": torch.tensor(300)}):
        loss, gradients = loss_and_gradients(full, inputs | number)
        own_loss, own_gradients = loss_and_gradients(chunked, inputs | number)
        assert own_loss == pytest.approx(loss, rel=1e-6)
        assert own_gradients.keys() == gradients.keys()
        for name, gradient in gradients.items():
            # a bias of the keys has no gradient but rounding, as softmax does not see it
            difference = (own_gradients[name] - gradient).norm()
            assert difference <= 1e-5 * gradient.norm() + 1e-7, name


@pytest.mark.parametrize("kind", models())
def test_bf16_differs_by_no_more_than_its_rounding(kind: str):
    full = models()[kind]
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    exact_loss, exact = loss_and_gradients(full, batch("padded"))
    loss, rounded = loss_and_gradients(full, batch("padded"), bf16=True)
    own_loss, own = loss_and_gradients(chunked, batch("padded"), bf16=True)
    assert abs(own_loss - exact_loss) <= abs(loss - exact_loss) + 1e-3
    for name, gradient in exact.items():
        error = (own[name] - gradient).norm()
        assert error <= 2 * (rounded[name] - gradient).norm() + 1e-6, name


def test_a_batch_without_any_counted_token_has_the_loss_of_the_full_logits():
    full = models()["tied"]
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    inputs = batch("the first label alone")
    loss, gradients = loss_and_gradients(full, inputs | {"num_items_in_batch": torch.tensor(5)})
    own_loss, own_gradients = loss_and_gradients(chunked, inputs | {"num_items_in_batch": torch.tensor(5)})
    assert own_loss == loss == 0
    assert all(torch.equal(own_gradients[name], gradients[name]) for name in gradients)
    with torch.no_grad():  # the mean of nothing, as in an evaluation
        assert full(**inputs).loss.isnan() and chunked(**inputs).loss.isnan()


def test_evaluation_has_the_same_loss_and_generation_its_logits():
    full = models()["untied"].eval()
    chunked = copy.deepcopy(full)
    use_chunked_loss(chunked)
    inputs = batch("padded")
    with torch.no_grad():
        assert chunked(**inputs).loss.item() == pytest.approx(full(**inputs).loss.item(), rel=1e-6)
        assert torch.equal(chunked(inputs["input_ids"]).logits, full(inputs["input_ids"]).logits)
        answer = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
        prompt = inputs["input_ids"][:, :8]
        assert torch.equal(chunked.generate(prompt, **answer), full.generate(prompt, **answer))


def test_fp16_keeps_the_small_gradients_of_a_large_vocabulary():
    """Half of the softmax is below the smallest number of fp16; the loss scale comes with the backward pass alone."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(300, 64), torch.randn(50_000, 64) * 0.05
    targets = torch.randint(0, 50_000, (300,))

    def gradients(dtype: torch.dtype, function) -> tuple[torch.Tensor, torch.Tensor]:
        x, w = (t.detach().to(dtype).requires_grad_() for t in (hidden, weight))
        (function(x, w) / 300 * 2**16).backward()
        return x.grad.float(), w.grad.float()

    exact = gradients(torch.float32, lambda x, w: F.cross_entropy(x @ w.T, targets, reduction="sum"))
    own = gradients(torch.float16, lambda x, w: CrossEntropyOfHead.apply(x, w, targets, True))
    for found, wanted in zip(own, exact, strict=True):
        assert found.isfinite().all()
        assert (found - wanted).norm() <= 2e-3 * wanted.norm()


def test_fp16_keeps_the_gradients_of_a_wide_model():
    """1,024 tokens in one chunk and hidden states up to 30: their sums would leave no room to scale."""
    torch.manual_seed(0)
    hidden = torch.randn(1024, 1024) * 7
    weight = torch.randn(3000, 1024) * 0.02
    targets = torch.randint(0, 3000, (1024,))
    found = []
    for dtype in (torch.float32, torch.float16):
        own_weight = weight.detach().clone().to(dtype).requires_grad_()
        loss = CrossEntropyOfHead.apply(hidden.to(dtype), own_weight, targets, True)
        (loss / 1024 * 2**12).backward()
        found.append(own_weight.grad.float())
    # sums of 16-bit numbers in another order: what is lost in the logits themselves is more
    assert (found[1] - found[0]).norm() <= 5e-3 * found[0].norm()


def test_a_sum_that_fp16_cannot_hold_is_not_infinite():
    """One token is the target everywhere, and the hidden states are large."""
    hidden, weight = torch.full((200, 16), 300.0).half(), torch.zeros(100, 16).half()
    hidden.requires_grad_()
    weight.requires_grad_()
    loss = CrossEntropyOfHead.apply(hidden, weight, torch.zeros(200, dtype=torch.long), True)
    (loss / 200).backward()
    assert weight.grad[0].float() == pytest.approx(torch.full((16,), -297.0), rel=1e-3)


def test_no_tensor_holds_tokens_times_vocabulary():
    largest = 0

    class Largest(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, arguments=(), options=None):
            nonlocal largest
            result = function(*arguments, **(options or {}))
            if isinstance(result, torch.Tensor):
                largest = max(largest, result.numel())
            return result

    model = models()["untied"]
    use_chunked_loss(model)
    inputs = batch("all")
    with Largest():
        model(**inputs).loss.backward()
    assert largest <= 36 * VOCABULARY, "logits of a chunk, of 160 tokens in all"


def test_a_model_that_changes_its_logits_is_refused_by_name():
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 1, "intermediate_size": 32}
    model = Gemma2ForCausalLM(Gemma2Config(**sizes))
    use_chunked_loss(model)
    message = "--loss: chunked is wrong for Gemma2ForCausalLM, which scales or caps its logits"
    with pytest.raises(WorkshopError, match=message):
        model(**batch("all"))


def test_a_first_loss_that_is_no_number_is_not_taken_for_changed_logits():
    model = models()["tied"]
    torch.nn.init.constant_(model.transformer.ln_f.weight, float("nan"))
    use_chunked_loss(model)
    assert model(**batch("all")).loss.isnan()


def head_of_two_layers(model) -> None:
    model.lm_head = torch.nn.Sequential(torch.nn.Linear(32, 32), torch.nn.Linear(32, VOCABULARY))


def head_with_a_bias(model) -> None:
    model.lm_head.bias = torch.nn.Parameter(torch.zeros(VOCABULARY))


@pytest.mark.parametrize("change", [head_of_two_layers, head_with_a_bias])
def test_heads_that_are_not_one_linear_layer_are_refused(change):
    model = models()["untied"]
    change(model)
    with pytest.raises(WorkshopError, match="LlamaForCausalLM has another; use --loss full"):
        check_head(model)


def test_a_model_with_a_loss_of_its_own_is_refused():
    sizes = {"vocab_size": VOCABULARY, "d_model": 32, "decoder_layers": 1, "decoder_ffn_dim": 32}
    with pytest.raises(WorkshopError, match="BartForCausalLM, which has a loss of its own; use --loss full"):
        check_head(BartForCausalLM(BartConfig(**sizes, decoder_attention_heads=2)))


def test_the_audit_knows_which_loss_runs():
    model = models()["tied"]
    check_head(model)
    assert not computes_loss_in_head(model)
    use_chunked_loss(model)
    assert computes_loss_in_head(model)
