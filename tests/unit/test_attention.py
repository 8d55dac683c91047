"""BLOOM with SDPA has the same loss, gradients, outputs and answers as with eager attention."""

import copy

import pytest
import torch
from transformers import BloomConfig, BloomForCausalLM

from config import ModelArguments
from model import build_meta_model
from models.bloom_sdpa import attention_name, use_attention
from models.chunked_loss import use_chunked_loss

LENGTH = 100
# alibi is computed differently if the number of heads is not a power of 2
WIDER = {"hidden_size": 192, "n_layer": 3, "n_head": 12}


def models(**sizes: int) -> tuple[BloomForCausalLM, BloomForCausalLM]:
    """Return the same model twice, in training mode: with eager attention and with SDPA."""
    torch.manual_seed(0)
    eager = BloomForCausalLM(BloomConfig(**{"vocab_size": 512, "hidden_size": 64, "n_layer": 2, "n_head": 4} | sizes))
    sdpa = copy.deepcopy(eager)
    use_attention(sdpa, "sdpa")
    assert (attention_name(eager), attention_name(sdpa)) == ("eager", "sdpa")
    return eager.train(), sdpa.train()


def batch(padding: str) -> dict[str, torch.Tensor]:
    """Return four sequences, some of them padded."""
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


@pytest.mark.promise("ATTENTION=sdpa does not change the training")
@pytest.mark.parametrize("variant", ["", "activation checkpointing", "chunked loss"])
@pytest.mark.parametrize("padding", ["right", "a row that is all padding"])
@pytest.mark.parametrize("sizes", [{}, WIDER], ids=["tiny", "wider"])
def test_loss_and_gradients_are_those_of_eager_attention(sizes, padding, variant):
    pair = models(**sizes)
    for model in pair:
        if variant == "activation checkpointing":
            model.activation_checkpointing_enable({"use_reentrant": False})
        if variant == "chunked loss":
            use_chunked_loss(model)
    (loss, gradients), (other_loss, other_gradients) = (loss_and_gradients(model, batch(padding)) for model in pair)
    assert other_loss.item() == pytest.approx(loss.item(), abs=1e-5)
    assert (other_gradients - gradients).norm() <= 1e-5 * gradients.norm()


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.bfloat16, 0.02), (torch.float16, 0.005)])
def test_sdpa_differs_only_by_rounding_in_16_bit(dtype, tolerance):
    pair = models(**WIDER)
    with torch.autocast("cpu", dtype=dtype):
        losses, gradients = zip(*(loss_and_gradients(model, batch("right")) for model in pair), strict=True)
    assert losses[1].item() == pytest.approx(losses[0].item(), rel=2e-4)
    assert (gradients[1] - gradients[0]).norm() <= tolerance * gradients[0].norm()


def test_with_left_padding_outputs_and_answers_are_the_same():
    """The generation for EM and F1 pads on the left. No training does, so gradients are not compared."""
    inputs = batch("left")
    del inputs["labels"]
    logits, unmasked, answers = [], [], []
    for model in models(**WIDER):
        model.eval()
        with torch.no_grad():
            unmasked.append(model(input_ids=inputs["input_ids"]).logits)
            logits.append(model(**inputs).logits[inputs["attention_mask"] == 1])
            answers.append(model.generate(**inputs, max_new_tokens=20, do_sample=False, use_cache=True))
    assert torch.allclose(*logits, atol=1e-5)
    assert torch.allclose(*unmasked, atol=1e-5), "without a mask"
    assert torch.equal(*answers)


@pytest.mark.parametrize("autocast", [False, True])
def test_sdpa_keeps_one_length_by_length_matrix_for_all_layers(autocast):
    """If the mask were in fp32, each layer would cast it under autocast and keep its own copy."""
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
    assert kept[0] >= 6, "the count must find the matrices that each eager layer keeps"
    assert kept[1] == 1


def test_a_model_that_is_compiled_as_a_whole_keeps_its_distances():
    _, model = models()
    inputs = batch("right")
    compiled = torch.compile(copy.deepcopy(model), backend="eager")
    assert compiled(**inputs).loss.item() == pytest.approx(model(**inputs).loss.item(), abs=1e-6)


def test_attention_that_a_model_lacks_is_refused(refusal):
    """The check needs only a model on the meta device, so it runs before the weights are loaded."""
    assert attention_name(build_meta_model(ModelArguments("tiny-bloom", attention="sdpa"))) == "sdpa"
    assert attention_name(build_meta_model(ModelArguments("custom-gpt", attention="sdpa"))) == "sdpa"
    line = refusal(build_meta_model, ModelArguments("custom-gpt", attention="eager"))
    assert line == "error: --attention: CustomGPTForCausalLM supports only sdpa; leave it out"
