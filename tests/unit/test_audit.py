"""The knob audit: a run in which something else happens than was asked for ends before its first step."""

import json
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader
from transformers import BloomConfig, BloomForCausalLM

from config import parse_command_line
from training import audit
from training.audit import NOT_ON_CPU, AuditCallback, Audited, audit_table, offload_knobs
from training.record import RunRecord


def loader() -> DataLoader:
    loader = DataLoader(range(16), batch_size=4, shuffle=True)
    loader.total_batch_size = 4
    return loader


def plain_trainer() -> SimpleNamespace:
    """What the audit reads of a Trainer that runs exactly what `options` ask for."""
    model = BloomForCausalLM(BloomConfig(vocab_size=32, hidden_size=8, n_layer=1, n_head=2))
    rows = [{"labels": [5, 6, 7], "input_ids": [5, 6, 7]}] * 64
    return SimpleNamespace(
        args=SimpleNamespace(gradient_accumulation_steps=2, save_strategy="no", device=torch.device("cpu")),
        is_deepspeed_enabled=False,
        model=model,
        model_wrapped=model,
        accelerator=SimpleNamespace(mixed_precision="no", num_processes=1),
        callback_handler=SimpleNamespace(train_dataloader=loader()),
        train_dataset=rows,
        eval_dataset=rows[:32],
        data_collator=SimpleNamespace(label_pad_token_id=-100, padding="max_length"),
        steps_per_epoch=8,
    )


@pytest.fixture
def options():
    words = "--fp16 False --train_size 64 --eval_size 32 --gradient_accumulation_steps 2 --save_strategy no"
    return parse_command_line("", words.split())


def begin(trainer, options) -> RunRecord:
    record = RunRecord("7")
    AuditCallback(trainer, options, record).on_train_begin(None, None, None)
    return record


def test_run_that_does_what_was_asked_for_is_printed_and_recorded(options, capsys):
    trainer = plain_trainer()
    record = begin(trainer, options)
    printed = capsys.readouterr().out
    lines = {tuple(line.split("  ")[0:1]): line for line in printed.splitlines()}
    assert printed.splitlines()[1].split() == ["knob", "requested", "effective"]
    for name in ("precision", "strategy", "world size", "global batch", "steps per epoch", "parameters", "label mode"):
        assert (name,) in lines, printed
    saved = json.loads(record.path.read_text())
    assert saved["knobs"]["precision"] == {"requested": "fp32", "effective": "fp32"}
    assert saved["knobs"]["global batch"] == {"requested": 8, "effective": 8}
    assert saved["steps_per_epoch"] == 8
    assert saved["parameters"] == sum(p.numel() for p in trainer.model.parameters())


def precision(trainer):
    trainer.accelerator.mixed_precision = "fp16"


def ranks(trainer):
    trainer.accelerator.num_processes = 2
    trainer.callback_handler.train_dataloader.total_batch_size = 8


def micro_batch(trainer):
    trainer.callback_handler.train_dataloader.total_batch_size = 2


def accumulation(trainer):
    trainer.args.gradient_accumulation_steps = 1


def labels(trainer):
    trainer.train_dataset = [{"labels": [-100, 6, 7]}] * 64


def padding_counted(trainer):
    trainer.data_collator.label_pad_token_id = 3


def padding(trainer):
    trainer.data_collator.padding = "longest"


def train_size(trainer):
    trainer.train_dataset = trainer.train_dataset[:60]


def eval_size(trainer):
    trainer.eval_dataset = trainer.eval_dataset[:30]


def saving(trainer):
    trainer.args.save_strategy = "epoch"


def sampling(trainer):
    trainer.callback_handler.train_dataloader = DataLoader(range(16), batch_size=4)
    trainer.callback_handler.train_dataloader.total_batch_size = 4


def workers(trainer):
    trainer.callback_handler.train_dataloader.num_workers = 2


def checkpointing(trainer):
    trainer.model.activation_checkpointing_enable()


def compiled(trainer):
    trainer.model.transformer.h[0].compile()


DIFFERENCES = [
    (precision, "precision: fp32 was requested, fp16 is what would run"),
    (ranks, "world size: 1 was requested, 2 is what would run"),
    (micro_batch, "micro batch: 4 was requested, 2 is what would run"),
    (accumulation, "gradient accumulation: 2 was requested, 1 is what would run"),
    (labels, "label mode: sequence was requested, answer is what would run"),
    (padding_counted, "label mode: sequence was requested, all is what would run"),
    (padding, "padding: max_length was requested, longest is what would run"),
    (train_size, "train size: 64 was requested, 60 is what would run"),
    (eval_size, "eval size: 32 was requested, 30 is what would run"),
    (sampling, "sampling: random was requested, sequential is what would run"),
    (workers, "data workers: 0 was requested, 2 is what would run"),
    (checkpointing, "checkpointing: False was requested, True is what would run"),
    (compiled, "compiled: False was requested, True is what would run"),
    (saving, "saving: no was requested, epoch is what would run"),
]


@pytest.mark.parametrize(("change", "line"), DIFFERENCES, ids=[change.__name__ for change, _ in DIFFERENCES])
def test_anything_else_than_requested_ends_the_run_with_3_and_names_the_knob(change, line, options, refusal):
    trainer = plain_trainer()
    change(trainer)
    expected = f"error: knob audit: {line}; correct the flag or the config"
    assert refusal(begin, trainer, options, code=3) == expected


def test_requested_strategy_that_does_not_run_is_a_difference(options, refusal):
    options.deepspeed_config = {"zero_optimization": {"stage": 2}}
    line = refusal(begin, plain_trainer(), options, code=3)
    assert "knob audit: strategy: DeepSpeed ZeRO-2 was requested, plain is what would run" in line


def test_difference_is_in_the_record_of_the_run_that_it_ended(options, refusal):
    trainer = plain_trainer()
    padding(trainer)
    refusal(begin, trainer, options, code=3)
    with open("results/7.json") as file:
        assert json.load(file)["knobs"]["padding"] == {"requested": "max_length", "effective": "longest"}


def test_a_difference_on_another_rank_ends_all_with_its_number(options, refusal, monkeypatch):
    """Rank 0 sees none: alone, it would train on and wait for the rank that has ended."""
    of_rank_1 = Audited("local parameter share", 0.5, 1.0)
    monkeypatch.setattr(audit, "gather_lists", lambda own: [own, [of_rank_1]])
    line = refusal(begin, plain_trainer(), options, code=3)
    assert "local parameter share: 0.5 was requested, 1.0 is what would run on rank 1;" in line


def test_what_the_hardware_cannot_do_is_shown_and_ends_nothing(options, monkeypatch, capsys):
    monkeypatch.setattr(audit, "audit", lambda *_: [Audited("optimizer pinned memory", True, NOT_ON_CPU)])
    begin(plain_trainer(), options)
    assert "optimizer pinned memory  True       n/a on CPU" in capsys.readouterr().out


def engine(offload_optimizer: bool, offload_param: bool) -> SimpleNamespace:
    """A ZeRO-3 engine as far as the audit looks for offloaded memory."""
    module = torch.nn.Linear(2, 2)
    for parameter in module.parameters():
        parameter.ds_tensor = parameter.detach().clone()
    optimizer = SimpleNamespace(
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        fp32_partitioned_groups_flat=[torch.zeros(4)],
        grad_partitions_flat_buffer=torch.zeros(4),
    )
    return SimpleNamespace(optimizer=optimizer, module=module, zero_optimization_stage=lambda: 3)


@pytest.mark.parametrize("sections", [{}, {"offload_optimizer": None}, {"offload_optimizer": {"device": "none"}}])
def test_no_offload_asked_for_and_none_done(sections):
    knobs = offload_knobs(engine(False, False), sections)
    assert {k.name: k.effective for k in knobs} == {"optimizer offload": "none", "parameter offload": "none"}
    assert not any(k.differs for k in knobs)


def test_offload_that_is_done_counts_and_pinning_is_not_applicable_on_the_cpu():
    sections = {name: {"device": "cpu", "pin_memory": True} for name in ("offload_optimizer", "offload_param")}
    knobs = {k.name: k for k in offload_knobs(engine(True, True), sections)}
    assert knobs["optimizer offload"].effective == knobs["parameter offload"].effective == "cpu"
    assert knobs["optimizer pinned memory"].effective == knobs["parameter pinned memory"].effective == NOT_ON_CPU
    assert not any(k.differs for k in knobs.values())


def test_offload_that_is_asked_for_and_not_done_is_a_difference():
    knobs = offload_knobs(engine(False, True), {"offload_optimizer": {"device": "cpu"}})
    assert {k.name for k in knobs if k.differs} == {"optimizer offload", "parameter offload"}


def test_table_is_aligned():
    lines = audit_table([Audited("a", 1, 1), Audited("longer name", "requested value", "x", "note")]).splitlines()
    assert lines[1:4] == [
        "knob         requested        effective",
        "a            1                1",
        "longer name  requested value  x          note",
    ]
