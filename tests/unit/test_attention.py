"""BLOOM's attention by scaled_dot_product_attention: the same loss, gradients, outputs and answers as step by step."""

import copy

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from config import ModelArguments
from model import build_meta_model
from training.bloom_sdpa import attention_name, use_attention
from training.chunked_loss import use_chunked_loss

LENGTH = 100
WIDER = {"hidden_size": 192, "n_layer": 3, "n_head": 12}  # heads that are no power of 2 have alibi of another kind


def models(**sizes: int) -> tuple[BloomForCausalLM, BloomForCausalLM]:
    """The same model twice, in training: as transformers computes its attention, and by SDPA."""
    torch.manual_seed(0)
    eager = BloomForCausalLM(BloomConfig(**{"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4} | sizes))
    sdpa = copy.deepcopy(eager)
    use_attention(sdpa, "sdpa")
    assert (attention_name(eager), attention_name(sdpa)) == ("eager", "sdpa")
    return eager.train(), sdpa.train()


def batch(padding: str) -> dict[str, torch.Tensor]:
    """Four sequences, of which some are padded."""
    mask = torch.ones(4, LENGTH, dtype=torch.long)
    if padding == "left":
        mask[1, :40] = 0
    else:
        mask[1, 60:] = 0
        mask[2, 8:] = 0
    if padding == "a row that is all padding":
        mask[3] = 0
    tokens = torch.randint(512, (4, LENGTH), generator=torch.Generator().manual_seed(1))
    return {"input_ids": tokens, "attention_mask": mask, "labels": tokens.masked_fill(mask == 0, -100)}


def loss_and_gradients(model: BloomForCausalLM, inputs: dict) -> tuple[torch.Tensor, torch.Tensor]:
    model.zero_grad()
    loss = model(**inputs).loss
    loss.backward()
    return loss.detach(), torch.cat([parameter.grad.flatten() for parameter in model.parameters()])


@pytest.mark.parametrize("how", ["", "activation checkpointing", "chunked loss"])
@pytest.mark.parametrize("padding", ["right", "a row that is all padding"])
@pytest.mark.parametrize("sizes", [{}, WIDER], ids=["tiny", "wider"])
def test_loss_and_gradients_are_those_of_eager_attention(sizes, padding, how):
    pair = models(**sizes)
    for model in pair:
        if how == "activation checkpointing":
            model.activation_checkpointing_enable({"use_reentrant": False})
        if how == "chunked loss":
            use_chunked_loss(model)
    (loss, gradients), (other_loss, other_gradients) = (loss_and_gradients(model, batch(padding)) for model in pair)
    assert other_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert (other_gradients - gradients).norm() <= 1e-5 * gradients.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.005)])
def test_in_16_bit_it_differs_by_rounding(dtype, tolerance):
    pair = models(**WIDER)
    with torch.autocast("cpu", dtype=dtype):
        losses, gradients = zip(*(loss_and_gradients(model, batch("right")) for model in pair), strict=True)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-4)
    assert (gradients[1] - gradients[0]).norm() <= tolerance * gradients[0].norm()


def test_with_left_padding_outputs_and_answers_are_the_same():
    """As EM and F1 generate. (Padding in front attends to nothing; what its gradients are, no training asks.)"""
    inputs = batch("left")
    del inputs["labels"]
    logits, answers = [], []
    for model in models(**WIDER):
        model.eval()
        with torch.no_grad():
            logits.append(model(**inputs).logits[inputs["attention_mask"] == 1])
            answers.append(model.generate(**inputs, max_new_tokens=20, do_sample=False, use_cache=True))
    assert torch.allclose(*logits, atol=1e-5)
    assert torch.equal(*answers)


def test_without_a_mask_too():
    tokens = batch("right")["input_ids"]
    logits = [model(input_ids=tokens).logits for model in models()]
    assert torch.allclose(*logits, atol=1e-5)


@pytest.mark.parametrize("autocast", [False, True])
def test_one_matrix_of_length_times_length_is_kept_for_all_layers(autocast):
    """An fp32 mask would be cast in each layer under autocast, and each would keep its copy."""
    kept = []
    for model in models(n_layer=6):
        places = set()

        def note(tensor: torch.Tensor, places=places) -> torch.Tensor:
            if tensor.shape[-2:] == (LENGTH, LENGTH):
                places.add(tensor.untyped_storage()._cdata)
            return tensor

        context = torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast)
        with context, torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            loss = model(**batch("right")).loss
        del loss
        kept.append(len(places))
    assert kept[0] >= 6, "eager keeps several in each layer, or this counts nothing"
    assert kept[1] == 1


def test_what_the_model_has_by_itself_is_left_alone():
    eager, _ = models()
    use_attention(eager, None)
    use_attention(eager, "eager")
    assert attention_name(eager) == "eager"


def test_attention_that_a_model_does_not_have_is_one_line(refusal):
    """Found before the weights are loaded; so is BLOOM's, of which train.py looks at the blocks."""
    assert attention_name(build_meta_model(ModelArguments("tiny-bloom", attention="sdpa"))) == "sdpa"
    assert attention_name(build_meta_model(ModelArguments("custom-gpt", attention="sdpa"))) == "sdpa"
    line = refusal(build_meta_model, ModelArguments("custom-gpt", attention="eager"))
    assert line == "error: --attention: CustomGPTForCausalLM supports only sdpa; leave it out"
