"""Tests of faults that no log names by itself: numbers that are not finite, and copies of the weights that differ."""

import re
from pathlib import Path

import pytest

from runs import FP16_ON_CPU, STRATEGIES
from workbench import complete_marks

# Each fault happens in step 4, and only the ranks BAD have it
FAULTS = """
import os
import torch
from guard.silent_faults import own_part
from training.trainer import WorkshopTrainer

BAD = os.environ["BAD"].split()
original = WorkshopTrainer.get_batch_samples


def get_batch_samples(self, *args, **kwargs):
    batches, labels = original(self, *args, **kwargs)
    if self.state.global_step == 3 and os.environ.get("RANK", "0") in BAD:
        globals()[os.environ["FAULT"]](self, batches)
    return batches, labels


WorkshopTrainer.get_batch_samples = get_batch_samples


def parts(trainer, name):
    weight = dict(trainer.model.named_parameters())[name]
    whole = [] if hasattr(weight, "device_mesh") else [weight.data]  # ZeRO-3 also keeps some weights whole
    return [part.view(-1) for part in [own_part(weight), *whole] if part.numel()]


def weight(trainer, batches):
    for part in parts(trainer, "transformer.h.1.mlp.dense_h_to_4h.weight"):
        part[0] = torch.inf


def flip(trainer, batches):
    part = parts(trainer, os.environ["FLIPPED"])[0]
    part.view(torch.int32)[0] ^= 1 << 20


def activation(trainer, batches):
    module = trainer.model.get_submodule("transformer.h.1.self_attention")
    module.register_forward_hook(lambda module, args, output: (output[0] * 1e38 * 1e38, *output[1:]))


def gradient(trainer, batches):
    module = trainer.model.get_submodule("transformer.h.1.mlp")
    module.register_full_backward_pre_hook(lambda module, grads: tuple(grad * torch.nan for grad in grads))


def question(trainer, batches):
    tokens = batches[1]["input_ids"]
    print("\\nBAD:", repr(trainer.tokenizer.decode(tokens[0])[:40])[:-1], flush=True)
    module = trainer.model.get_submodule("transformer.word_embeddings")
    module.register_forward_hook(lambda module, args, output: output * torch.inf if args[0].equal(tokens) else output)
"""
FP16 = Path(FP16_ON_CPU).read_text().rpartition("train.run_and_exit")[0]
PLACES = {
    "weight": r"transformer\.h\.1\.mlp\.dense_h_to_4h \(its weights are not finite, its largest input is \d\S*\)",
    "activation": r"transformer\.h\.1\.self_attention \(its largest input is \d\S*\)",
    "question": r"transformer\.word_embeddings \(its weights are finite\)",
}


def rows(*rows: tuple[str, ...], in_make_test: tuple[tuple[str, ...], ...]) -> list:
    marks = {row: [] if row in in_make_test else [pytest.mark.faults] for row in rows}
    return [pytest.param(*row, marks=marks[row], id=" ".join(row)) for row in rows]


@pytest.mark.promise("reliability 12")
@pytest.mark.parametrize(
    ("fault", "method"),
    rows(
        *((fault, method) for fault in PLACES for method in ("plain", "ddp", "zero2", "zero3", "full_shard")),
        in_make_test=(("weight", "zero3"), ("activation", "full_shard"), ("question", "ddp")),
    ),
)
def test_a_loss_that_is_not_finite_names_module_rank_and_question(train, fault, method):
    run = STRATEGIES[method]
    bad = str(run.world - 1) if fault == "question" else "0 1"
    name = f"{fault}_{method}"
    ended = train(name, *run.arguments, patch=FAULTS, ranks=run.ranks, code=1, FAULT=fault, BAD=bad, **run.settings)
    (line,) = re.findall("error: .*", ended.log)
    rank = bad if fault == "question" else "0"
    assert re.match(
        rf"error: loss: is not finite in step 4: rank {rank} computes the first wrong number in {PLACES[fault]}, "
        r"from a micro batch that begins with .Question: ",
        line,
    ), line
    if fault == "question":
        (begins,) = re.findall("^BAD: (.*)", ended.log, re.MULTILINE)
        assert f"begins with {begins}" in line
    assert (ended.record["status"], ended.record["exit_code"]) == ("failed", 1)
    assert f"error: loss: {ended.record['reason']}; " in line


@pytest.mark.parametrize(
    "method",
    [
        "plain",
        *(pytest.param(name, marks=pytest.mark.faults) for name in ("ddp", "zero0", "zero2", "zero3", "full_shard")),
    ],
)
def test_fp16_ends_after_three_steps(train, method):
    """Loss scaling skips such a step, and a smaller scale does not help here."""
    run = STRATEGIES[method]
    how = run.settings | {"FAULT": "activation", "BAD": "0 1", "TRAIN_SIZE": 64}  # 8 steps before the evaluation
    ended = train(f"overflow_{method}", *run.arguments, patch=FP16 + FAULTS, ranks=run.ranks, code=1, **how)
    (line,) = re.findall("error: .*", ended.log)
    assert line.startswith("error: loss: is not finite in step 6 (3 steps in a row): rank 0 computes the first ")
    assert "transformer.h.1.self_attention (" in line and line.endswith(", or use --bf16 instead of --fp16")


@pytest.mark.promise("reliability 1")
@pytest.mark.parametrize(
    "method", ["full_shard", *(pytest.param(m, marks=pytest.mark.faults) for m in ("plain", "ddp"))]
)
def test_weights_that_are_not_finite_are_never_saved(train, method):
    """The loss of step 4 is finite, its gradients are not. The older checkpoint stays. DeepSpeed skips such a step."""
    run = STRATEGIES[method]
    words = ("--eval_strategy", "no", "--save_strategy", "steps", "--save_steps", "3", "--steps", "4")
    how = {"FAULT": "gradient", "BAD": str(run.world - 1), "EM_F1": "True"} | run.settings
    ended = train(f"gradient_{method}", *run.arguments, *words, patch=FAULTS, ranks=run.ranks, code=1, **how)
    (line,) = re.findall("error: .*", ended.log)
    assert line.startswith("error: weights: are not finite after step 4, ") and "--learning_rate" in line, line
    assert (ended.record["status"], ended.record["exit_code"]) == ("failed", 1)
    assert complete_marks(ended.output) == {"checkpoint-3": True}
    assert not (ended.output / "model.safetensors").exists() and "(a score of 0" not in ended.log


WEIGHT = "transformer.h.0.mlp.dense_4h_to_h.weight"
LORA = ("--lora_rank", "8", "--learning_rate", "1e-2")


@pytest.mark.promise("reliability 16")
@pytest.mark.parametrize(
    ("method", "ranks", "named"),
    [
        ("ddp", 2, "ranks 0, 1 of 2 copies"),
        pytest.param("ddp", 4, "rank 1 of 4 copies", marks=pytest.mark.faults),
        pytest.param("zero0", 2, "ranks 0, 1 of 2 copies", marks=pytest.mark.faults),
        pytest.param("zero0", 4, "rank 1 of 4 copies", marks=pytest.mark.faults),
        pytest.param("lora", 2, "ranks 0, 1 of 2 copies", marks=pytest.mark.faults),
        pytest.param("lora", 4, "rank 1 of 4 copies", marks=pytest.mark.faults),
        pytest.param("hybrid_shard_2x2", 4, "ranks 1, 3 of 2 copies", marks=pytest.mark.faults),
    ],
)
def test_a_flipped_bit_is_found_before_the_checkpoint_is_complete(train, method, ranks, named):
    words = LORA if method == "lora" else STRATEGIES[method].arguments
    how = {"FAULT": "flip", "BAD": "1", "FLIPPED": WEIGHT, "BATCH_SIZE": 4 // ranks}
    ended = train(f"flip_{method}_{ranks}", *words, patch=FAULTS, ranks=ranks, code=3, **how)
    (line,) = re.findall("error: .*", ended.log)
    found = f"error: weights: {WEIGHT} differs between ranks that hold the same weights: {named}; resume from the last "
    assert line.startswith(found), line
    assert not list(ended.folder.glob(f"output/{ended.job_id}/*/complete.json"))
