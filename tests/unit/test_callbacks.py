"""Tests of the callbacks: the steady rate on a simulated clock, GPU utilisation, and losses that are not finite."""

import json
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from measure import speed
from measure.speed import WARM_UP_STEPS, TrainSpeed
from measure.utilisation import Utilisation
from records.writer import RunRecord
from stub_nvml import WATTS
from training.callbacks import DropoutCallback
from training.trainer import WorkshopTrainer

NAN, INFINITY = float("nan"), float("inf")
SAMPLES_PER_STEP = 8
TOKENS_PER_STEP = [1000, 250, 90, 200_000]  # real tokens, padding, counted labels, squared lengths


class Run:
    """Call TrainSpeed in the Trainer's order. Warm-up steps take 60 s, and later steps take 2 s."""

    def __init__(self, monkeypatch, first_step: int = 0):
        self.now = 100.0
        monkeypatch.setattr(speed, "clock", lambda: self.now)
        self.state = SimpleNamespace(global_step=first_step)
        dataset = range(10 * SAMPLES_PER_STEP)
        args = SimpleNamespace(device="cpu")
        self.trainer = SimpleNamespace(args=args, state=self.state, tokens=0, train_dataset=dataset, steps_per_epoch=10)
        self.trainer.get_tp_size = lambda: 1
        self.record = RunRecord("7", "output/7")
        flops = SimpleNamespace(count_operations=lambda real, counted, squares: real + 10 * counted + squares / 100)
        # The counter of one GPU, which draws WATTS all the time
        energy = SimpleNamespace(joules=lambda: WATTS * self.now, reason="")
        self.speed = TrainSpeed(self.trainer, energy, flops, peak=5000.0)
        self.done = 0

    def step(self, pause: bool = False) -> None:
        """Run a step. pause: let 1000 s pass after the step, as for an evaluation or a checkpoint."""
        self.trainer.tokens = self.trainer.tokens + torch.tensor(TOKENS_PER_STEP)
        self.speed.begin_step()
        self.now += 60 if self.done < WARM_UP_STEPS else 2
        self.done += 1
        self.state.global_step += 1
        self.speed.end_step()
        if pause:
            self.speed.pause()
            self.now += 1000

    def measured(self, *names: str) -> list:
        found = self.speed.summary(self.record.reasons)
        return [found[name] for name in names]

    def energy(self) -> dict:
        self.speed.record_energy(self.record)
        return self.record.content["energy"]

    def resume(self, tokens: list, joules: list) -> None:
        """Resume from a checkpoint after 8 steady steps."""
        saved = {"steady_steps": 8, "steady_seconds": 16.0, "tokens": tokens, "steady_joules": joules}
        self.speed.resume_counts(saved)


RATES = ("warm_up_seconds", "steady_steps", "steady_steps_per_second", "steady_samples_per_second")


def test_warm_up_evaluations_and_checkpoints_are_left_out_of_the_rates(monkeypatch):
    """Tokens are counted in all steps, including the warm-up."""
    run = Run(monkeypatch)
    assert run.measured(*RATES, "mfu_percent") == [None, 0, None, None, None]
    for number in range(20):
        run.step(pause=number % 4 == 3)
    assert run.measured(*RATES) == [60.0 * WARM_UP_STEPS, 20 - WARM_UP_STEPS, 0.5, 0.5 * SAMPLES_PER_STEP]
    assert run.measured("real_tokens", "padding_tokens", "counted_tokens") == [20_000, 5000, 1800]
    operations_per_step = 1000 + 10 * 90 + 200_000 / 100
    mfu = round(100 * operations_per_step / 2 / 5000, 2)
    assert run.measured("steady_tokens_per_second", "mfu_percent") == [500.0, mfu]
    run.speed.peak = 1000.0
    assert run.measured("mfu_percent") == [None], "the steps were faster than the measured peak"


@pytest.mark.promise("energy adds up over stops, and is empty with a reason where it cannot be known")
def test_energy_belongs_to_the_same_steps_as_the_rates(monkeypatch):
    """The joules of warm-up, evaluations and checkpoints do not count."""
    run = Run(monkeypatch)
    assert run.energy() == {}
    for number in range(20):
        run.step(pause=number % 4 == 3)
    joules = 2.0 * WATTS * (20 - WARM_UP_STEPS)
    assert run.energy() == {
        "steady_joules": [joules],
        "steady_joules_sum": joules,
        "joules_per_question": 2.0 * WATTS / SAMPLES_PER_STEP,
        "joules_per_1000_tokens": 2.0 * WATTS,
        "mean_watts": WATTS,
    }


@pytest.mark.parametrize(
    ("earlier", "watts"),
    [([16.0 * WATTS], WATTS), ([NAN], None), ([16.0 * WATTS] * 2, None)],
    ids=["known", "without a counter", "another number of GPUs"],
)
def test_a_resumed_run_warms_up_again_and_continues_the_counts_of_its_checkpoint(monkeypatch, earlier, watts):
    run = Run(monkeypatch, first_step=10)
    run.resume(tokens=[[10_000, 0, 0, 0], [8000, 0, 0, 0]], joules=earlier)
    for number in range(10):
        run.step(pause=number == 9)
    assert run.measured("real_tokens", "steady_steps") == [20_000, 8 + 10 - WARM_UP_STEPS]
    assert run.measured("steady_steps_per_second", "steady_tokens_per_second") == [0.5, 500.0]
    assert run.energy().get("mean_watts") == watts


def unsupported():
    raise RuntimeError("Not Supported")


@pytest.mark.parametrize(
    ("utilisation", "mean", "reason"),
    [(lambda: 40, 40, ""), (unsupported, None, "Not Supported")],
    ids=["known", "unknown"],
)
def test_gpu_utilisation_is_recorded_or_empty_with_a_reason(utilisation, mean, reason, gpu, monkeypatch):
    properties = SimpleNamespace(total_memory=32 * 2**20)
    monkeypatch.setattr("torch.cuda.utilization", utilisation)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 3 * 2**20)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 4 * 2**20)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: properties)
    record = RunRecord("7", "output/7")
    callback = Utilisation(record)
    callback.sample()
    memory = {"avg_mem_alloc_MB": 3, "avg_mem_reserved_MB": 4, "avg_mem_total_MB": 32}
    assert callback.means() == {"avg_gpu_util_%": mean, "std_gpu_util_%": None if mean is None else 0, **memory}
    assert record.reasons == ({"callbacks.avg_gpu_util_%": reason} if reason else {})


def test_in_fp16_only_three_losses_in_a_row_that_are_not_finite_end_the_run(refusal, monkeypatch):
    """tests/integration/test_silent_faults.py tests the other precisions and several ranks."""
    monkeypatch.setattr("training.trainer.explain_loss", lambda model, losses, question: "somewhere")
    parts = {"bad_losses": 0, "model": None, "batches": []}
    trainer = SimpleNamespace(args=SimpleNamespace(fp16=True), state=SimpleNamespace(global_step=6), **parts)
    for loss in (2.0, NAN, -INFINITY, 2.0, NAN, -INFINITY):
        trainer.loss_of_step = torch.tensor(loss)
        WorkshopTrainer.check_loss(trainer, None)
    line = refusal(WorkshopTrainer.check_loss, trainer, None, code=1)
    assert "is not finite in step 7 (3 steps in a row): somewhere; " in line


@pytest.mark.parametrize(("ranks", "loss"), [([[0.5, NAN, 1.0]], 0.5), ([[0.5, NAN, 1.0], [1.5, 0.0, 1.0]], 1.0)])
def test_a_resumed_run_continues_the_losses_of_its_checkpoint(ranks, loss):
    """On another number of ranks, each rank continues with the mean."""
    saved = {"logged_loss": 20.0, "last_logged_step": 18, "unlogged": ranks, "seconds": 7.0}
    # Version 2.0.0 named the counts after the class of a callback
    state = SimpleNamespace(global_step=18, stateful_callbacks={"MeasureCallback": json.loads(json.dumps(saved))})
    trainer = SimpleNamespace(_tr_loss=torch.tensor(0.0), state=state)
    trainer.resume_counts = partial(WorkshopTrainer.resume_counts, trainer)
    of_speed: list[dict] = []
    WorkshopTrainer.keep_counts(trainer, SimpleNamespace(resume_counts=of_speed.append))
    assert of_speed == list(state.stateful_callbacks.values())
    assert (trainer._tr_loss, trainer.bad_steps) == (loss, 1.0) and trainer.unlogged_not_finite.isnan()
    assert (trainer._total_loss_scalar, trainer._globalstep_last_logged, trainer.earlier_seconds) == (20.0, 18, 7.0)
    trainer._tr_loss, trainer.unlogged_not_finite = torch.tensor(0.5), torch.tensor(NAN)
    counts = WorkshopTrainer.counts(trainer)
    assert repr(counts["unlogged"]) == "[[0.5, nan, 1.0]]" and counts["logged_loss"] == 20.0


class Devices(TorchDispatchMode):
    """Collect the devices of all tensors that operators are given."""

    found: ClassVar[set[str]] = set()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.found.update(each.device.type for each in tree_leaves((args, kwargs)) if torch.is_tensor(each))
        return function(*args, **(kwargs or {}))


def test_the_end_of_a_step_reads_no_tensor_of_another_device():
    """On a GPU, copying such a tensor would wait for all earlier kernels."""
    with torch.device("meta"):
        loss, before, bad = torch.zeros(3)
    args = SimpleNamespace(device="meta", fp16=False)
    trainer = SimpleNamespace(args=args, _tr_loss=loss, loss_before_step=before, unlogged_not_finite=bad, bad_steps=bad)
    with Devices():
        WorkshopTrainer.end_step(trainer)
    assert Devices.found == {"meta"}


@pytest.mark.parametrize(("ranks_of_a_group", "seeds"), [(1, [0, 43, 44, 45]), (2, [0, 0, 43, 43])])
def test_only_the_ranks_of_a_tensor_group_share_their_random_numbers(ranks_of_a_group, seeds):
    """Two nodes have two ranks each. The first group keeps the numbers of a run on one rank, here 0."""
    callback = DropoutCallback(SimpleNamespace(get_tp_size=lambda: ranks_of_a_group))
    for number, seed in enumerate(seeds):
        torch.manual_seed(0)
        args = SimpleNamespace(seed=42, process_index=number, local_process_index=number % 2)
        callback.on_train_begin(args, None, None)
        assert torch.initial_seed() == seed, number
