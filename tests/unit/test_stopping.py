"""What a signal does to a run, at each moment; whole runs: tests/faults, tests/commands/test_job_sh.py, tests/slurm."""

import os
import signal
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from records.schema import STOPPING_SIGNALS
from training.stopping import StopCallback, StopRequest


@pytest.fixture
def stop():
    """In the training; the handlers of pytest come back behind the test."""
    before = {number: signal.getsignal(number) for number in STOPPING_SIGNALS}
    stop = StopRequest()
    stop.install_handlers()
    stop.training = True
    yield stop
    for number, handler in before.items():
        signal.signal(number, handler)


def send(*numbers: int) -> None:
    for number in numbers:
        os.kill(os.getpid(), number)


def test_before_and_behind_the_training_a_signal_ends_the_run(stop):
    stop.training = False
    with pytest.raises(SystemExit) as ended:
        send(signal.SIGTERM)
    assert ended.value.code == 143
    send(signal.SIGTERM, signal.SIGINT)  # repeated, while the run writes down its end


def test_in_the_training_it_asks_for_a_stop_and_what_launchers_repeat_changes_nothing(stop, capfd):
    send(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)
    assert stop.agree_to_stop()
    assert stop.agreed_signal == signal.SIGUSR1
    assert capfd.readouterr().out == "\nSIGUSR1: a checkpoint follows at the end of this step\n"


def test_workers_of_the_data_loader_leave_it_to_their_parent(stop, capfd):
    child = os.fork()
    if child == 0:
        send(signal.SIGTERM)
        os._exit(stop.signal)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().out == ""


def test_what_nohup_ignores_stays_ignored(stop):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.install_handlers()
    send(signal.SIGHUP)
    assert not stop.agree_to_stop()


# steps of an epoch: 8, of the training: 13


@pytest.fixture
def watching(stop) -> StopCallback:
    """As a stop was asked for in a step."""
    send(signal.SIGTERM)
    return StopCallback(stop, SimpleNamespace(saved_step=0, steps_per_epoch=8))


def state(step: int) -> SimpleNamespace:
    return SimpleNamespace(global_step=step, max_steps=13)


def flags(control: TrainerControl) -> set[str]:
    return {name for name in ("training_stop", "save", "evaluate", "log") if getattr(control, f"should_{name}")}


def end_of_epoch() -> TrainerControl:
    """As the Trainer's own callback sets it, also where a stop has left the epoch in the middle."""
    return TrainerControl(should_evaluate=True, should_save=True, should_log=True)


def test_within_an_epoch_the_step_is_saved_at_once(watching):
    control = TrainerControl(should_log=True)
    watching.on_step_end(None, state(3), control)
    assert flags(control) == {"training_stop", "save", "log"}
    control = end_of_epoch()
    watching.on_epoch_end(None, state(3), control)
    assert flags(control) == set()


@pytest.mark.parametrize("step", [8, 13])
def test_at_the_end_of_an_epoch_the_evaluation_comes_first(watching, step):
    control = TrainerControl()
    watching.on_step_end(None, state(step), control)
    assert flags(control) == {"training_stop"}
    control = end_of_epoch()
    watching.on_epoch_end(None, state(step), control)
    assert flags(control) == {"save", "evaluate", "log"}
