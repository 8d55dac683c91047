"""The knob audit ends a run before its first step if a knob would not have the requested effect."""

import json
import operator
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BloomConfig, BloomForCausalLM

from guard import audit
from guard.audit import AuditCallback, AuditedKnob, offload_knobs
from models.lora import add_adapters
from records.writer import RunRecord
from settings.command_line import parse_command_line
from settings.optimizers import BY_FLAG


def loader() -> DataLoader:
    loader = DataLoader(range(16), batch_size=4, shuffle=True)
    loader.total_batch_size = 4
    return loader


def plain_trainer() -> SimpleNamespace:
    """Return the parts of a Trainer that the audit reads. They match the settings exactly."""
    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=8, n_layer=1, n_head=2))
    row = {"labels": [5, 6, 7], "input_ids": [5, 6, 7]}
    return SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=2, save_strategy="no", device=torch.device("cpu")),
        is_deepspeed_enabled=False,
        model=model,
        model_wrapped=model,
        optimizer=SimpleNamespace(optimizer=torch.optim.AdamW(model.parameters(), fused=True)),
        accelerator=SimpleNamespace(mixed_precision="no", num_processes=1),
        callback_handler=SimpleNamespace(train_dataloader=loader()),
        train_dataset=[row] * 64,
        eval_dataset=[row] * 32,
        data_collator=SimpleNamespace(label_pad_token_id=-100, padding="max_length"),
        steps_per_epoch=8,
        get_tp_size=lambda: 1,
    )


@pytest.fixture
def settings():
    words = "--fp16 False --train_size 64 --eval_size 32 --gradient_accumulation_steps 2 --save_strategy no"
    return parse_command_line("", ["--labels", "sequence", *words.split()])


def run_audit(trainer, settings) -> RunRecord:
    record = RunRecord("7", "output/7")
    AuditCallback(trainer, settings, record).on_train_begin(None, None, None)
    return record


def use_two_ranks(trainer):
    trainer.accelerator.num_processes = 2
    trainer.callback_handler.train_dataloader.total_batch_size = 8


def use_unfused_adamw(trainer):
    trainer.optimizer.optimizer = torch.optim.AdamW(trainer.model.parameters())


def attribute_setter(path: str, value: object) -> Callable:
    """Return a function that sets an attribute of the trainer."""
    *holder, name = path.split(".")
    return lambda trainer: setattr(operator.attrgetter(".".join(holder))(trainer), name, value)


LOADER = "callback_handler.train_dataloader"
# knob -> function that changes the trainer, requested value, effective value
DIFFERENCES = {
    "precision": (attribute_setter("accelerator.mixed_precision", "fp16"), "fp32", "fp16"),
    "optimizer": (use_unfused_adamw, "AdamW (torch, fused)", "AdamW (torch)"),
    # The moments of Adam would also be in bf16, in which small updates are lost
    "trainable weights": (lambda trainer: trainer.model.bfloat16(), "fp32", "bf16"),
    "world size": (use_two_ranks, 1, 2),
    "micro batch": (attribute_setter(f"{LOADER}.total_batch_size", 2), 4, 2),
    "gradient accumulation": (attribute_setter("args.gradient_accumulation_steps", 1), 2, 1),
    "label mode": (attribute_setter("data_collator.label_pad_token_id", 3), "sequence", "all"),
    "checkpointing": (lambda trainer: trainer.model.activation_checkpointing_enable(), False, True),
    "compiled": (lambda trainer: trainer.model.transformer.h[0].compile(), False, True),
}


@pytest.mark.parametrize("knob", DIFFERENCES)
def test_a_difference_ends_the_run_with_3_and_names_the_knob(knob, settings, refusal):
    change, requested, effective = DIFFERENCES[knob]
    trainer = plain_trainer()
    change(trainer)
    line = f"error: knob audit: {knob}: {requested} was requested, {effective} is what would run"
    assert refusal(run_audit, trainer, settings, code=3) == f"{line}; correct the flag or the config"
    recorded = json.loads(Path("results/7.json").read_text())["knobs"][knob]
    assert recorded == {"requested": requested, "effective": effective}


def test_a_model_that_freezes_parameters_by_design_is_trained(settings):
    trainer = plain_trainer()
    trainer.model.transformer.ln_f.requires_grad_(False)
    knobs = json.loads(run_audit(trainer, settings).path.read_text())["knobs"]
    assert knobs["trainable parameters"] == {"requested": "1,160", "effective": "1,144"}
    assert knobs["frozen weights"] == {"requested": "fp32", "effective": "fp32"}


@pytest.mark.promise("LoRA: the same losses under every method, and the bytes of the formula")
def test_a_base_that_is_not_frozen_in_the_precision_of_the_computation_ends_the_run(settings, refusal):
    """With LoRA, the audit compares the adapters and the frozen weights. Another error is a frozen adapter."""
    trainer = plain_trainer()
    settings = replace(settings, model=replace(settings.model, lora_rank=2))
    add_adapters(trainer.model, 2)
    knobs = json.loads(run_audit(trainer, settings).path.read_text())["knobs"]
    layers = (8 + 24) + (8 + 8) + (8 + 32) + (32 + 8)  # inputs and outputs
    assert knobs["trainable parameters"] == {"requested": f"{2 * layers}", "effective": f"{2 * layers}"}
    trainer.model.transformer.h[0].mlp.dense_h_to_4h.lora_b.requires_grad = False
    assert "knob audit: trainable parameters: " in refusal(run_audit, trainer, settings, code=3)
    trainer.model = trainer.model_wrapped = BloomForCausalLM(trainer.model.config)
    add_adapters(trainer.model, 2, torch.bfloat16)
    line = refusal(run_audit, trainer, settings, code=3)
    assert line.startswith("error: knob audit: frozen weights: fp32 was requested, bf16 is what would run;")


@pytest.mark.parametrize("flag", [*BY_FLAG, "unknown"])
def test_another_optimizer_ends_the_run_unless_the_workshop_does_not_know_it(flag, settings, refusal):
    trainer = plain_trainer()
    settings = replace(settings, trainer=replace(settings.trainer, optim=flag))
    trainer.optimizer.optimizer = torch.optim.Adam(trainer.model.parameters())
    if flag in BY_FLAG:
        assert BY_FLAG[flag].shown, "a row without its class; write the one that the audit shows"
        line = f"knob audit: optimizer: {BY_FLAG[flag].shown[0]} was requested, Adam (torch) is what would run;"
        assert line in refusal(run_audit, trainer, settings, code=3)
    else:
        run_audit(trainer, settings)


def test_a_difference_on_another_rank_ends_this_rank_too(settings, refusal, monkeypatch):
    """Rank 0 has no difference itself. If it continued, it would wait for the rank that has ended."""
    on_rank_1 = AuditedKnob("local parameter share", 0.5, 1.0)
    monkeypatch.setattr(audit, "gather_lists", lambda own: [own, [on_rank_1]])
    line = refusal(run_audit, plain_trainer(), settings, code=3)
    assert "local parameter share: 0.5 was requested, 1.0 is what would run on rank 1;" in line


def test_an_offload_that_is_not_done_as_requested_is_a_difference():
    """The config offloads the optimizer, but this ZeRO-3 engine offloads its parameters.

    tests/integration tests engines that offload as requested.
    """
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.ds_tensor = parameter.detach().clone()
    optimizer = SimpleNamespace(offload_optimizer=False, offload_param=True)
    engine = SimpleNamespace(optimizer=optimizer, module=module, zero_optimization_stage=lambda: 3)
    knobs = offload_knobs(engine, {"offload_optimizer": {"device": "cpu"}})
    assert {knob.name for knob in knobs if knob.differs} == {"optimizer offload", "parameter offload"}
