"""The rate of the steps alone, by a clock that the test turns; losses that are no numbers; signs of going on."""

from types import SimpleNamespace

import pytest
import torch

from parallel import watchdog
from training import callbacks
from training.callbacks import (
    WARM_UP_STEPS,
    FiniteLossCallback,
    HeartbeatCallback,
    TrainSpeedCallback,
    UtilisationCallback,
    evaluations,
)

SAMPLES_PER_STEP = 8
TOKENS_PER_STEP = [1000, 250, 90, 200_000]  # real, padding, counted, squares


class Run:
    """Calls a TrainSpeedCallback in the Trainer's order, with steps that take 2 s and slow ones at the start."""

    def __init__(self, monkeypatch, first_step: int = 0):
        self.now = 100.0
        monkeypatch.setattr(callbacks, "clock", lambda: self.now)
        self.state = SimpleNamespace(global_step=first_step)
        tokens = torch.zeros(4, dtype=torch.int64)
        self.trainer = SimpleNamespace(tokens=tokens, train_dataset=range(10 * SAMPLES_PER_STEP), steps_per_epoch=10)
        flops = SimpleNamespace(needed=lambda real, counted, squares: real + 10 * counted + squares / 100)
        self.callback = TrainSpeedCallback(self.trainer, flops, peak=5000.0)
        self.done = 0
        self.callback.on_train_begin(None, self.state, None)

    def step(self, evaluate: bool = False, save: bool = False, seconds: float = 2.0) -> None:
        control = SimpleNamespace(should_evaluate=evaluate, should_save=save)
        self.callback.on_step_begin(None, self.state, control)
        self.now += 60 if self.done < WARM_UP_STEPS else seconds
        self.trainer.tokens = self.trainer.tokens + torch.tensor(TOKENS_PER_STEP)
        self.done += 1
        self.state.global_step += 1
        self.callback.on_step_end(None, self.state, control)
        if evaluate or save:
            self.now += 1000

    def end_epoch(self) -> None:
        self.callback.on_epoch_end(None, self.state, None)
        self.now += 1000  # the evaluation and the checkpoint

    def epoch(self, steps: int) -> None:
        for _ in range(steps):
            self.step()
        self.end_epoch()

    def measured(self, *names: str) -> list:
        found = self.callback.measured()
        return [found[name] for name in names]


RATES = ("warm_up_seconds", "steady_steps", "steady_steps_per_second", "steady_samples_per_second")


def test_warm_up_and_pauses_between_epochs_are_left_out(monkeypatch):
    run = Run(monkeypatch)
    run.epoch(10)
    run.epoch(10)
    assert run.measured(*RATES) == [60.0 * WARM_UP_STEPS, 20 - WARM_UP_STEPS, 0.5, 0.5 * SAMPLES_PER_STEP]


def test_tokens_are_counted_in_all_steps_and_their_rate_in_the_steady_ones(monkeypatch):
    run = Run(monkeypatch)
    run.epoch(10)
    run.epoch(10)
    assert run.measured("real_tokens", "padding_tokens", "counted_tokens") == [20_000, 5000, 1800]
    per_step = 1000 + 10 * 90 + 200_000 / 100
    mfu = round(100 * per_step / 2 / 5000, 2)
    assert run.measured("steady_tokens_per_second", "mfu_percent") == [500.0, mfu]
    run.callback.flops = None
    assert run.measured("mfu_percent") == [None]


def test_a_resumed_run_counts_the_tokens_on(monkeypatch):
    whole = Run(monkeypatch)
    whole.epoch(10)
    whole.epoch(10)
    first = Run(monkeypatch)
    first.epoch(10)
    second = Run(monkeypatch, first_step=10)
    second.callback.go_on_from(first.callback.steps, first.callback.seconds, first.callback.all_tokens())
    second.epoch(10)
    in_all, in_steady_steps = second.callback.all_tokens()
    assert in_all == whole.callback.all_tokens()[0]
    assert in_steady_steps == [second.callback.steps * count for count in TOKENS_PER_STEP]
    assert second.measured("steady_tokens_per_second") == [500.0]


@pytest.mark.parametrize("pause", ["evaluate", "save"])
def test_pauses_within_an_epoch_are_left_out(pause, monkeypatch):
    run = Run(monkeypatch)
    for number in range(12):
        run.step(**{pause: number % 4 == 3})
    run.end_epoch()
    assert run.measured("steady_steps", "steady_steps_per_second") == [12 - WARM_UP_STEPS, 0.5]


def test_warm_up_may_last_longer_than_the_first_epoch(monkeypatch):
    run = Run(monkeypatch)
    for _ in range(3):
        run.epoch(2)
    assert run.measured("steady_steps", "steady_steps_per_second") == [6 - WARM_UP_STEPS, 0.5]


def test_resumed_run_warms_up_again(monkeypatch):
    run = Run(monkeypatch, first_step=500)
    run.epoch(10)
    assert run.measured("steady_steps", "steady_steps_per_second") == [10 - WARM_UP_STEPS, 0.5]


def test_run_without_steps_after_the_warm_up_has_no_rate(monkeypatch):
    run = Run(monkeypatch)
    run.epoch(WARM_UP_STEPS)
    assert run.measured(*RATES) == [None, 0, None, None]


def test_each_evaluation_of_the_log_becomes_an_entry():
    speed = {"eval_runtime": 2.0, "eval_samples_per_second": 16.0}
    log = [{"loss": 3.0, "step": 5}, {"epoch": 1.0, "step": 8, "eval_loss": 2.5, **speed}, {"train_runtime": 9.0}]
    entry = {"epoch": 1.0, "step": 8, "loss": 2.5, "runtime_s": 2.0, "samples_per_second": 16.0}
    assert evaluations(log) == [entry]


def test_utilisation_is_the_mean_over_the_steps(monkeypatch):
    callback = UtilisationCallback()
    callback.on_train_begin(None, None, None)
    samples = iter([{"cpu_util_%": 10.0, "process_mem_MB": 5.0}, {"cpu_util_%": 30.0, "process_mem_MB": 7.0}])
    monkeypatch.setattr(callback, "process_sample", lambda: next(samples))
    for _ in range(2):
        callback.on_step_end(None, None, None)
    assert callback.means() == {"avg_cpu_util_%": 20.0, "std_cpu_util_%": 10.0, "avg_process_mem_MB": 6.0}


def test_utilisation_that_the_gpu_does_not_tell_is_empty_with_a_reason(gpu, monkeypatch):
    def untold():
        raise ModuleNotFoundError("no nvidia-ml-py")

    properties = SimpleNamespace(total_memory=80 * 2**20)
    monkeypatch.setattr("torch.cuda.utilization", untold)
    monkeypatch.setattr("torch.cuda.memory_allocated", lambda: 2**20)
    monkeypatch.setattr("torch.cuda.memory_reserved", lambda: 2**21)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda: properties)
    callback = UtilisationCallback()
    callback.on_step_end(None, None, None)
    means = callback.means()
    assert (means["avg_gpu_util_%"], means["std_gpu_util_%"]) == (None, None)
    assert (means["avg_mem_alloc_MB"], means["avg_mem_total_MB"]) == (1.0, 80.0)
    assert callback.reason == "no nvidia-ml-py"


NAN, INFINITY = float("nan"), float("inf")


def watched() -> tuple[SimpleNamespace, FiniteLossCallback]:
    """A trainer that sums the losses of a step, and the callback that looks at them."""
    trainer = SimpleNamespace(args=SimpleNamespace(device=torch.device("cpu")), loss_of_step=0)
    return trainer, FiniteLossCallback(trainer)


def train(*losses: float, log_every: int = 1, micro_batches: int = 1) -> None:
    """The Trainer's loop over these losses, each of one micro batch."""
    coming = iter(losses)
    trainer, callback = watched()
    for step in range(1, len(losses) // micro_batches + 1):
        for _ in range(micro_batches):
            trainer.loss_of_step = trainer.loss_of_step + torch.tensor(next(coming))
        control = SimpleNamespace(should_log=step % log_every == 0, should_evaluate=False, should_save=False)
        callback.on_step_end(None, SimpleNamespace(global_step=step), control)
    callback.on_epoch_end(None, SimpleNamespace(global_step=step), control)


@pytest.mark.parametrize("bad", [NAN, INFINITY, -INFINITY])
def test_the_third_loss_in_a_row_that_is_not_finite_ends_the_run(bad, refusal):
    train(2.0, bad, bad, 2.0, bad, bad)  # and the end of an epoch
    assert refusal(train, 2.0, bad, bad, 2.0, bad, bad, bad, code=1) == (
        "error: loss: is not finite since step 5 (3 steps in a row); "
        "lower --learning_rate, or use --bf16 instead of --fp16"
    )


def test_losses_are_looked_at_when_the_trainer_logs_and_after_an_epoch(refusal):
    assert "since step 1 (5 steps in a row)" in refusal(lambda: train(*[NAN] * 9, log_every=5), code=1)
    assert "since step 1 (4 steps in a row)" in refusal(lambda: train(*[NAN] * 4, log_every=5), code=1)


def test_a_step_is_all_its_micro_batches(refusal):
    train(2.0, NAN, NAN, 2.0, 2.0, 2.0, 2.0, NAN, micro_batches=2)
    line = refusal(lambda: train(2.0, 2.0, 2.0, NAN, NAN, 2.0, 2.0, NAN, micro_batches=2), code=1)
    assert "since step 2 (3 steps in a row)" in line


@pytest.mark.parametrize("kind", ["should_log", "should_evaluate", "should_save"])
def test_no_such_weights_are_saved(kind, refusal):
    trainer, callback = watched()
    quiet = {"should_log": False, "should_evaluate": False, "should_save": False}
    for step in range(1, 5):
        trainer.loss_of_step = torch.tensor(NAN)
        callback.on_step_end(None, SimpleNamespace(global_step=step), SimpleNamespace(**quiet))
    trainer.loss_of_step = torch.tensor(NAN)
    control = SimpleNamespace(**quiet | {kind: True})
    assert "since step 1 (5 " in refusal(callback.on_step_end, None, SimpleNamespace(global_step=5), control, code=1)


def test_another_ranks_losses_end_this_one_too(monkeypatch, refusal):
    def three(tensor: torch.Tensor, op: object) -> None:
        assert (op, tensor.tolist()) == (torch.distributed.ReduceOp.MAX, 0)
        tensor.fill_(3)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "all_reduce", three)
    assert "(3 steps in a row)" in refusal(train, 2.0, code=1)


def test_an_evaluation_without_a_finite_loss_ends_the_run(refusal):
    _, callback = watched()
    state = SimpleNamespace(global_step=8)
    callback.on_evaluate(None, state, None, metrics={"eval_loss": 2.0})
    assert refusal(lambda: callback.on_evaluate(None, state, None, metrics={"eval_loss": NAN}), code=1).startswith(
        "error: evaluation loss: is nan after step 8; lower --learning_rate"
    )


def test_each_step_evaluation_batch_and_checkpoint_is_a_sign_of_going_on(monkeypatch):
    seen = []
    monkeypatch.setattr(watchdog, "beat", seen.append)
    callback = HeartbeatCallback()
    callback.on_step_begin(None, SimpleNamespace(global_step=11), None)
    for name in ("on_step_end", "on_prediction_step", "on_save"):
        getattr(callback, name)(None, SimpleNamespace(global_step=12), None)
    assert seen == ["step 12", "the end of step 12", "the evaluation after step 12", "the end of saving step 12"]
