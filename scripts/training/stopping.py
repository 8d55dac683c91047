"""Stopping a run so that it can go on later: on a signal all ranks save one checkpoint and end with exit code 75.

SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C ask for it. A handler notes the signal, and the ranks agree at the end of
the optimizer step, as each of them may have got it in another one. An evaluation or a save is finished before. Before
the training there is nothing to save, and behind it only the model and its scores: there a signal just ends the run.
"""

import contextlib
import os
import signal
import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distributed.collectives import max_over_ranks, print_once, rank, wait_for_all_ranks
from job.with_parent import end_with_parent
from records.schema import STOPPING_SIGNALS
from shared.errors import STOPPED


class StopRequest:
    """What signals ask of this rank, and what all ranks agreed on."""

    def __init__(self) -> None:
        self.signal = 0  # the first one that came in the training, 0 before
        self.agreed_signal = 0
        self.training = False  # only in it a signal asks for a checkpoint
        self.process = os.getpid()

    def listen(self) -> None:
        for number in STOPPING_SIGNALS:
            # nohup lets it ignore HUP. To INT all are deaf that a script starts in the background, as job.sh does
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN:
                signal.signal(number, self.note)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()  # torchrun may be killed, and its ranks would train on

    def note(self, number: int, frame: object) -> None:
        """The handler. Launchers repeat signals, so a second one changes nothing."""
        if os.getpid() != self.process:
            return  # a worker of the data loader, which was forked with it
        if not self.training:
            self.ignore_signals()  # a repeated one must not interrupt what the run does at its end
            sys.exit(128 + number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
        if not self.signal:
            self.signal = number
            # not by print: the signal may have come in the middle of another one
            if rank() == 0:
                text = f"\n{signal.Signals(number).name}: a checkpoint follows at the end of this step\n"
                with contextlib.suppress(OSError):
                    os.write(sys.stdout.fileno(), text.encode())

    def ignore_signals(self) -> None:
        for number in STOPPING_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def agreed(self) -> bool:
        """Whether the ranks stop here, the same on every rank. Collective, until they have agreed."""
        if not self.agreed_signal:
            self.agreed_signal = max_over_ranks(self.signal)
        return bool(self.agreed_signal)

    def save_and_exit_if_asked(self, trainer: Any, record: Any) -> None:
        """End the run with exit code 75 when the ranks agree to stop, with a checkpoint of this step. Collective."""
        if not self.agreed():
            self.training = False
            if self.signal:  # it came just now
                sys.exit(128 + self.signal)
            return
        folder = trainer.save_here()
        self.ignore_signals()  # all that was asked for is done: a late one changes no exit code
        step = trainer.state.global_step
        name = signal.Signals(self.agreed_signal).name
        record.update(stop={"signal": name, "step": step, "checkpoint": str(folder)})
        print_once(
            f"stopped by {name} at step {step} of {trainer.state.max_steps}; "
            f"go on with --resume_from_checkpoint {folder}, or as the same job"
        )
        wait_for_all_ranks()  # a launcher ends the others as soon as one has ended
        sys.exit(STOPPED)


class StopCallback(TrainerCallback):
    """Asks after each step and each save whether to stop. Comes behind the Trainer's own callback, and overrules it."""

    def __init__(self, stop: StopRequest, trainer: Any):
        """trainer: a WorkshopTrainer, which knows what it has saved."""
        self.stop = stop
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stop.training = True
        if state.global_step >= state.max_steps:
            print_once(f"step {state.global_step} was the last one, nothing is left to train")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop.agreed():
            control.should_training_stop = True
            # at the end of an epoch its evaluation comes first, and belongs into the checkpoint
            control.should_save = not self.ends_epoch(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Also called where a stop has left the epoch in the middle: then nothing of its end is done."""
        if self.stop.agreed_signal:
            ends_epoch = self.ends_epoch(state)
            control.should_save = ends_epoch and self.trainer.saved_step != state.global_step
            control.should_evaluate = control.should_evaluate and ends_epoch
            control.should_log = control.should_log and ends_epoch

    def ends_epoch(self, state: TrainerState) -> bool:
        return state.global_step % self.trainer.steps_per_epoch == 0 or state.global_step >= state.max_steps

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop.agreed():
            control.should_training_stop = True
