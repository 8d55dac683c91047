"""The knob audit: a run in which something else happens than was asked for ends before its first step."""

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

from records.writer import RunRecord
from settings.command_line import parse_command_line
from training import audit
from training.audit import AuditCallback, AuditedKnob, offload_knobs


def loader(shuffle: bool = True) -> DataLoader:
    loader = DataLoader(range(16), batch_size=4, shuffle=shuffle)
    loader.total_batch_size = 4
    return loader


def plain_trainer() -> SimpleNamespace:
    """The parts of a Trainer that the audit reads: it runs exactly what the settings ask for."""
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
    return parse_command_line("", words.split())


def begin(trainer, settings) -> RunRecord:
    record = RunRecord("7")
    AuditCallback(trainer, settings, record).on_train_begin(None, None, None)
    return record


def test_run_that_does_what_was_asked_for_is_printed_and_recorded(settings, capsys):
    trainer = plain_trainer()
    record = begin(trainer, settings)
    lines = capsys.readouterr().out.splitlines()
    assert lines[1].split() == ["knob", "requested", "effective"]
    assert lines[2].split() == ["precision", "fp32", "fp32"]
    saved = json.loads(record.path.read_text())
    assert saved["knobs"]["precision"] == {"requested": "fp32", "effective": "fp32"}
    assert saved["knobs"]["global batch"] == {"requested": 8, "effective": 8}
    assert saved["steps_per_epoch"] == 8
    assert saved["parameters"] == sum(p.numel() for p in trainer.model.parameters())


def ranks(trainer):
    trainer.accelerator.num_processes = 2
    trainer.callback_handler.train_dataloader.total_batch_size = 8


def checkpointing(trainer):
    trainer.model.activation_checkpointing_enable()


def compiled(trainer):
    trainer.model.transformer.h[0].compile()


def unfused(trainer):
    trainer.optimizer.optimizer = torch.optim.AdamW(trainer.model.parameters())


def changed(path: str, value: object) -> Callable:
    """Sets an attribute of the trainer."""
    *holder, name = path.split(".")
    return lambda trainer: setattr(operator.attrgetter(".".join(holder))(trainer), name, value)


LOADER = "callback_handler.train_dataloader"
# knob -> what happens instead, requested, effective
DIFFERENCES = {
    "precision": (changed("accelerator.mixed_precision", "fp16"), "fp32", "fp16"),
    "optimizer": (unfused, "AdamW (torch, fused)", "AdamW (torch)"),
    "world size": (ranks, 1, 2),
    "micro batch": (changed(f"{LOADER}.total_batch_size", 2), 4, 2),
    "gradient accumulation": (changed("args.gradient_accumulation_steps", 1), 2, 1),
    "label mode": (changed("data_collator.label_pad_token_id", 3), "sequence", "all"),
    "sampling": (changed(LOADER, loader(shuffle=False)), "random", "sequential"),
    "checkpointing": (checkpointing, False, True),
    "compiled": (compiled, False, True),
}


@pytest.mark.parametrize("knob", DIFFERENCES)
def test_anything_else_than_requested_ends_the_run_with_3_and_names_the_knob(knob, settings, refusal):
    change, requested, effective = DIFFERENCES[knob]
    trainer = plain_trainer()
    change(trainer)
    line = f"error: knob audit: {knob}: {requested} was requested, {effective} is what would run"
    assert refusal(begin, trainer, settings, code=3) == f"{line}; correct the flag or the config"
    recorded = json.loads(Path("results/7.json").read_text())["knobs"][knob]
    assert recorded == {"requested": requested, "effective": effective}


def test_an_optimizer_that_is_not_pytorchs_adamw_is_shown_as_it_runs(settings):
    trainer = plain_trainer()
    settings = replace(settings, trainer=replace(settings.trainer, optim="sgd"))
    trainer.optimizer.optimizer = torch.optim.SGD(trainer.model.parameters())
    knobs = json.loads(begin(trainer, settings).path.read_text())["knobs"]
    assert knobs["optimizer"] == {"requested": "SGD (torch)", "effective": "SGD (torch)"}


def test_a_difference_on_another_rank_ends_all_with_its_number(settings, refusal, monkeypatch):
    """Rank 0 sees none: alone, it would train on and wait for the rank that has ended."""
    of_rank_1 = AuditedKnob("local parameter share", 0.5, 1.0)
    monkeypatch.setattr(audit, "gather_lists", lambda own: [own, [of_rank_1]])
    line = refusal(begin, plain_trainer(), settings, code=3)
    assert "local parameter share: 0.5 was requested, 1.0 is what would run on rank 1;" in line


def test_offload_that_is_asked_for_and_not_done_is_a_difference():
    """A ZeRO-3 engine that has offloaded its parameters, where the optimizer was to be; done: tests/integration."""
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.ds_tensor = parameter.detach().clone()
    optimizer = SimpleNamespace(offload_optimizer=False, offload_param=True)
    engine = SimpleNamespace(optimizer=optimizer, module=module, zero_optimization_stage=lambda: 3)
    knobs = offload_knobs(engine, {"offload_optimizer": {"device": "cpu"}})
    assert {knob.name for knob in knobs if knob.differs} == {"optimizer offload", "parameter offload"}
