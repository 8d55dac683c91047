"""Stopping a run so that it can go on later: on a signal all ranks save one checkpoint and end with exit code 75.

SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C ask for it. The ranks agree at the end of the optimizer step, as each of
them may have got the signal in another one. Before the training there is nothing to save: the run ends at once, with
128 + the signal's number. So it does on a second signal.
"""

import os
import signal
import socket
import sys
import threading
import time
from pathlib import Path
from typing import Any

from transformers import TrainerCallback

from errors import STOPPED
from job.finish import finish_record
from job.with_parent import end_with_parent
from parallel.distributed import control_channel, highest_of_all, rank

SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP, signal.SIGINT)
# Slurm, srun, job.sh and torchrun all pass the same signal on: what comes this soon after the first is the first
SECONDS_OF_RELAYS = 5.0


class Stopped(SystemExit):
    """Ends the run on every rank, once its checkpoint is complete."""

    def __init__(self) -> None:
        super().__init__(STOPPED)


class EvaluationInterrupted(Exception):
    """Leaves an evaluation for a stop; the resumed run makes up for it."""


class StopRequest:
    """What signals ask of this rank, and what all ranks agreed on.

    A thread reacts, not Python's handlers: those wait until the main thread is back from a collective or a write.
    """

    def __init__(self) -> None:
        self.signal = 0  # the first one, 0 before
        self.signalled_at = 0.0
        self.agreed_signal = 0
        self.can_save = False  # from the first step on
        self.over = False
        self.record_path: Path | None = None
        self.channel: Any = None

    def listen(self) -> None:
        reader, writer = socket.socketpair()
        writer.setblocking(False)
        signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        # workers of the data loader would write their signals into it, too
        os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))
        for number in SIGNALS:
            if signal.getsignal(number) is not signal.SIG_IGN:  # as nohup does
                signal.signal(number, do_nothing)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()  # torchrun may be killed, and its ranks would train on
        threading.Thread(target=self.react, args=(reader, writer), name="signals", daemon=True).start()

    def react(self, reader: socket.socket, writer: socket.socket) -> None:
        """writer: kept, or it would be closed."""
        while True:
            number = reader.recv(1)[0]
            if number not in SIGNALS or self.over:
                continue
            if not self.signal:
                self.signal = number
                self.signalled_at = time.monotonic()
                if not self.can_save:
                    self.end_at_once(number, "before the first step, nothing to save")
                say(f"{name_of(number)}: a checkpoint follows at the end of this step; another signal ends all at once")
            elif number == signal.SIGINT or time.monotonic() - self.signalled_at > SECONDS_OF_RELAYS:
                self.end_at_once(number, "a second signal, nothing saved since the last checkpoint")

    def end_at_once(self, number: int, why: str) -> None:
        say(f"ended by {name_of(number)}: {why}")
        if rank() == 0 and self.record_path is not None and self.record_path.exists():
            finish_record(self.record_path, "stopped", 128 + number)
        sys.stdout.flush()
        os._exit(128 + number)  # the main thread may be in a call that does not return

    def close(self) -> None:
        """From here on nothing is stopped any more, and no late signal changes the exit code."""
        self.over = True
        for number in SIGNALS:
            signal.signal(number, signal.SIG_IGN)  # Python's shutdown puts back the default in place of a handler

    def agreed(self) -> bool:
        """Whether the ranks stop here, the same on every rank. Collective, until they have agreed."""
        if not self.agreed_signal:
            if self.channel is None:
                self.channel = control_channel()
            self.agreed_signal = highest_of_all(int(self.signal), self.channel)
        return bool(self.agreed_signal)


def do_nothing(number: int, frame: object) -> None:
    """A handler: without one, Python would not wake the thread, and the signal would end the process."""


def name_of(number: int) -> str:
    return signal.Signals(number).name


def say(text: str) -> None:
    if rank() == 0:
        print(text, flush=True)


class StopCallback(TrainerCallback):
    """Asks after each step, evaluation batch and save whether to stop. To be added behind CheckpointCallback."""

    def __init__(self, stop: StopRequest, trainer: Any, steps_per_epoch: int):
        self.stop = stop
        self.trainer = trainer
        self.steps_per_epoch = steps_per_epoch
        self.training = False

    def on_train_begin(self, args, state, control, **kwargs):
        self.stop.agreed()  # opens the channel, and ends nothing: the training can save from here on
        self.stop.can_save = True
        self.training = True
        if state.global_step >= state.max_steps:
            say(f"step {state.global_step} was the last one, nothing is left to train: what follows is done again")
        if self.evaluation_is_due(args, state):
            say(f"evaluation of step {state.global_step}, for which the run before had no time")
            self.trainer.evaluate()

    def evaluation_is_due(self, args, state) -> bool:
        """Whether the checkpoint is of a step that is evaluated, and was saved before that was done."""
        if state.global_step == 0 or any(entry.get("step") == state.global_step for entry in evaluations(state)):
            return False
        if args.eval_strategy == "epoch":
            return state.global_step % self.steps_per_epoch == 0 or state.global_step >= state.max_steps
        return args.eval_strategy == "steps" and state.global_step % state.eval_steps == 0

    def on_step_end(self, args, state, control, **kwargs):
        if self.stop.agreed():
            control.should_training_stop = True
            if args.metric_for_best_model is None:
                control.should_evaluate = False
            # what the end of an epoch logs belongs into the checkpoint
            control.should_save = not self.ends_epoch(state)
        return control

    def on_epoch_end(self, args, state, control, **kwargs):
        if self.stop.agreed_signal:
            if args.metric_for_best_model is None:
                control.should_evaluate = False
            control.should_save = self.ends_epoch(state) and self.trainer.saved_step != state.global_step
            control.should_log = control.should_log and self.ends_epoch(state)
        return control

    def ends_epoch(self, state) -> bool:
        return state.global_step % self.steps_per_epoch == 0 or state.global_step >= state.max_steps

    def on_prediction_step(self, args, state, control, **kwargs):
        # a metric that decides on the best model, or on the learning rate, cannot be made up for later
        if self.training and args.metric_for_best_model is None and self.stop.agreed():
            raise EvaluationInterrupted

    def on_save(self, args, state, control, **kwargs):
        if self.stop.agreed():
            control.should_training_stop = True
        return control


def evaluations(state) -> list[dict]:
    return [entry for entry in state.log_history if "eval_loss" in entry]
