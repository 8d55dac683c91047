"""The effect of a signal at each moment of a run.

tests/faults, tests/commands/test_job_sh.py and tests/slurm send signals to real runs.
"""

import os
import signal
from types import SimpleNamespace

import pytest
from transformers import TrainerControl

from guard.stopping import StopCallback, StopRequest
from shared.errors import STOPPING_SIGNALS


@pytest.fixture
def stop():
    """A StopRequest during the training. The signal handlers of pytest are restored after the test."""
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


def test_a_signal_before_or_after_the_training_ends_the_run(stop):
    stop.training = False
    with pytest.raises(SystemExit) as ended:
        send(signal.SIGTERM)
    assert ended.value.code == 143
    send(signal.SIGTERM, signal.SIGINT)  # repeated signals have no effect while the run closes its record


def test_a_signal_in_the_training_requests_a_stop_and_repeats_are_ignored(stop, capfd):
    send(signal.SIGUSR1, signal.SIGTERM, signal.SIGTERM)
    assert stop.agree_to_stop()
    assert stop.agreed_signal == signal.SIGUSR1
    assert capfd.readouterr().out == "\nSIGUSR1: a checkpoint follows at the end of this step\n"


def test_workers_of_the_data_loader_leave_a_signal_to_their_parent(stop, capfd):
    child = os.fork()
    if child == 0:
        send(signal.SIGTERM)
        os._exit(stop.signal)
    assert os.waitpid(child, 0)[1] == 0
    assert capfd.readouterr().out == ""


def test_a_signal_that_nohup_ignores_stays_ignored(stop):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop.install_handlers()
    send(signal.SIGHUP)
    assert not stop.agree_to_stop()


# The end of a step or an epoch. An epoch has 8 steps, and the training has 13 steps


@pytest.mark.parametrize("step", [8, 13])
def test_a_stop_at_the_end_of_an_epoch_evaluates_first(stop, step):
    """tests/faults stops runs within an epoch, where no evaluation is due."""
    send(signal.SIGTERM)
    callback = StopCallback(stop, SimpleNamespace(saved_step=0, steps_per_epoch=8))
    state = SimpleNamespace(global_step=step, max_steps=13)
    control = TrainerControl()
    callback.on_step_end(None, state, control)
    assert control.should_training_stop
    assert not (control.should_save or control.should_evaluate or control.should_log)
    # The Trainer sets this control at the end of an epoch, also if a stop ends the epoch early
    control = TrainerControl(should_evaluate=True, should_save=True, should_log=True)
    callback.on_epoch_end(None, state, control)
    assert control.should_save and control.should_evaluate and control.should_log
