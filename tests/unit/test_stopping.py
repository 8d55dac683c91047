"""What a signal does to a run, at each moment; real ones: tests/faults, tests/commands/test_job_sh.py, tests/slurm."""

import signal
import socket
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from training import stopping
from training.stopping import EvaluationInterrupted, StopCallback, StopRequest


class Ended(Exception):
    pass


@pytest.fixture
def clock(monkeypatch) -> SimpleNamespace:
    """Seconds that the test sets."""
    now = SimpleNamespace(seconds=100.0)
    monkeypatch.setattr(stopping.time, "monotonic", lambda: now.seconds)
    return now


def react(stop: StopRequest, *numbers: int) -> None:
    """Let the thread's function react to these signals; raises Ended where the process would end."""
    reader, writer = socket.socketpair()
    writer.sendall(bytes(numbers))
    writer.shutdown(socket.SHUT_WR)
    with pytest.raises((Ended, IndexError)) as ended:  # IndexError: no further signal
        stop.react(reader, writer)
    if ended.type is Ended:
        raise ended.value


@pytest.fixture
def stop(monkeypatch) -> StopRequest:
    stop = StopRequest()
    stop.can_save = True

    def end_at_once(number: int, why: str) -> None:
        raise Ended(f"{number}: {why}")

    monkeypatch.setattr(stop, "end_at_once", end_at_once)
    return stop


def test_the_first_signal_asks_for_a_stop_and_is_named(stop, capsys):
    react(stop, signal.SIGUSR1)
    assert stop.signal == signal.SIGUSR1
    assert capsys.readouterr().out.startswith("SIGUSR1: a checkpoint follows at the end of this step;")
    assert stop.agreed()


def test_before_the_first_step_it_ends_the_run(stop):
    stop.can_save = False
    with pytest.raises(Ended, match="15: before the first step, nothing to save"):
        react(stop, signal.SIGTERM)


def test_what_launchers_repeat_is_one_signal(stop, clock):
    react(stop, signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM, signal.SIGHUP)
    assert stop.signal == signal.SIGUSR1


def test_a_second_one_later_ends_the_run(stop, clock):
    react(stop, signal.SIGTERM)
    clock.seconds += 100
    with pytest.raises(Ended, match="15: a second signal, nothing saved since the last checkpoint"):
        react(stop, signal.SIGTERM)


def test_ctrl_c_twice_ends_the_run(stop):
    with pytest.raises(Ended, match="2: a second signal"):
        react(stop, signal.SIGINT, signal.SIGINT)


def test_at_the_very_end_nothing_is_stopped_any_more(stop):
    stop.over = True
    react(stop, signal.SIGTERM)
    assert not stop.signal


def test_other_signals_are_none_of_its_business(stop):
    react(stop, signal.SIGCHLD)
    assert not stop.signal


def callback(stop: StopRequest, saved_step: int = 0) -> StopCallback:
    return StopCallback(stop, SimpleNamespace(evaluate=lambda: None, saved_step=saved_step), steps_per_epoch=8)


def state(step: int, evaluated: tuple = (), max_steps: int = 16) -> SimpleNamespace:
    history = [{"step": number, "eval_loss": 1.0} for number in evaluated]
    return SimpleNamespace(global_step=step, max_steps=max_steps, eval_steps=4, log_history=history)


ARGS = SimpleNamespace(output_dir="output/7", eval_strategy="epoch", metric_for_best_model=None)


def flags(control: TrainerControl) -> dict[str, bool]:
    return {name: getattr(control, f"should_{name}") for name in ("training_stop", "save", "evaluate", "log")}


def test_without_a_stop_the_training_goes_on():
    control = TrainerControl(should_evaluate=True)
    watching = callback(StopRequest())
    watching.on_step_end(ARGS, state(3), control)
    watching.on_epoch_end(ARGS, state(3), control)
    assert flags(control) == {"training_stop": False, "save": False, "evaluate": True, "log": False}


def test_within_an_epoch_the_step_is_saved_at_once(stop):
    stop.signal = signal.SIGTERM
    control = TrainerControl(should_evaluate=True, should_log=True)
    callback(stop).on_step_end(ARGS, state(3), control)
    assert flags(control) == {"training_stop": True, "save": True, "evaluate": False, "log": True}
    control = TrainerControl(
        should_evaluate=True, should_save=True, should_log=True
    )  # as DefaultFlowCallback sets them
    callback(stop, saved_step=3).on_epoch_end(ARGS, state(3), control)
    assert flags(control) == {"training_stop": False, "save": False, "evaluate": False, "log": False}


@pytest.mark.parametrize("step", [8, 13])
def test_at_the_end_of_an_epoch_its_log_is_saved_too(stop, step):
    stop.signal = signal.SIGTERM
    control = TrainerControl()
    callback(stop).on_step_end(ARGS, state(step, max_steps=13), control)
    assert flags(control) == {"training_stop": True, "save": False, "evaluate": False, "log": False}
    control = TrainerControl(should_evaluate=True, should_log=True)
    callback(stop).on_epoch_end(ARGS, state(step, max_steps=13), control)
    assert flags(control) == {"training_stop": False, "save": True, "evaluate": False, "log": True}


def test_a_stop_during_a_save_needs_no_second_one(stop):
    stop.signal = signal.SIGTERM
    control = TrainerControl(should_save=True, should_evaluate=True)
    callback(stop).on_save(ARGS, state(8), control)
    callback(stop, saved_step=8).on_epoch_end(ARGS, state(8), control)
    assert flags(control) == {"training_stop": True, "save": False, "evaluate": False, "log": False}


def test_an_evaluation_is_left_for_a_stop_but_not_one_that_decides_on_the_best_model(stop):
    stop.signal = signal.SIGTERM
    watching = callback(stop)
    watching.training = True
    with pytest.raises(EvaluationInterrupted):
        watching.on_prediction_step(ARGS, state(8), TrainerControl())
    best = SimpleNamespace(**vars(ARGS) | {"metric_for_best_model": "loss"})
    watching.on_prediction_step(best, state(8), TrainerControl())
    control = TrainerControl(should_evaluate=True)
    watching.on_step_end(best, state(8), control)
    watching.on_epoch_end(best, state(8), control)
    assert control.should_evaluate


@pytest.mark.parametrize(
    ("strategy", "now", "due"),
    [
        ("epoch", state(0), False),
        ("epoch", state(8), True),
        ("epoch", state(8, evaluated=(8,)), False),
        ("epoch", state(9, evaluated=(8,)), False),
        ("epoch", state(13, evaluated=(8,), max_steps=13), True),
        ("steps", state(8, evaluated=(4,)), True),
        ("steps", state(9, evaluated=(4, 8)), False),
        ("no", state(8), False),
    ],
)
def test_an_evaluation_that_a_stop_left_out_is_due(strategy, now, due, stop):
    args = SimpleNamespace(**vars(ARGS) | {"eval_strategy": strategy})
    assert callback(stop).evaluation_is_due(args, now) == due
