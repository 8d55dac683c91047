"""Stop a run on a signal so that it can be resumed: all ranks save one checkpoint and end with exit code 75.

SIGTERM, SIGUSR1, SIGUSR2, SIGHUP and Ctrl-C stop a run. A handler stores the signal. The ranks may receive it in
different steps, so they agree at the end of each optimizer step whether to stop. A running evaluation or save is
completed first. Before and after the training, a signal ends the run without a checkpoint.
"""

import contextlib
import os
import signal
import sys
from typing import Any

from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distributed.collectives import max_over_ranks, print_once, rank, wait_for_all_ranks
from job.on_node import end_with_parent, handle_signals
from measure.energy import EnergyMeter
from shared.errors import STOPPED


class StopRequest:
    """The signal that this rank has received, and the signal on which all ranks have agreed to stop."""

    def __init__(self) -> None:
        self.signal = 0  # the first signal that this rank received during the training, 0 without a signal
        self.agreed_signal = 0
        self.training = False  # outside the training a signal ends the run without a checkpoint
        self.process = os.getpid()

    def install_handlers(self) -> None:
        handle_signals(self.handle_signal)
        if "TORCHELASTIC_RUN_ID" in os.environ:
            end_with_parent()  # without this, ranks would continue after torchrun was killed

    def handle_signal(self, number: int, frame: object) -> None:
        """Handle a signal. Launchers repeat signals, so later signals change nothing."""
        if os.getpid() != self.process:
            return  # this is a worker of the data loader, which inherited the handler when it was forked
        if not self.training:
            self.ignore_signals()  # a repeated signal must not interrupt the end of the run
            sys.exit(128 + number)
        if number == signal.SIGINT:
            signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends the process at once
        if not self.signal:
            self.signal = number
            # print() is not safe in a signal handler: the signal may have interrupted another print()
            if rank() == 0:
                text = f"\n{signal.Signals(number).name}: a checkpoint follows at the end of this step\n"
                with contextlib.suppress(OSError):
                    os.write(sys.stdout.fileno(), text.encode())

    def ignore_signals(self) -> None:
        # With SIG_IGN, Python would print a traceback for a signal that it has received but not yet handled
        handle_signals(lambda *_: None)

    def agree_to_stop(self) -> bool:
        """Return whether the ranks stop, with the same result on every rank. Collective until they agree to stop."""
        if not self.agreed_signal:
            self.agreed_signal = max_over_ranks(self.signal)
        return bool(self.agreed_signal)

    def save_and_exit_if_asked(self, trainer: Any, record: Any, energy: EnergyMeter) -> None:
        """If the ranks agree to stop, save a checkpoint of this step and exit with code 75. Collective."""
        if not self.agree_to_stop():
            self.training = False
            if self.signal:  # the signal arrived after the ranks had agreed to continue
                sys.exit(128 + self.signal)
            return
        folder = trainer.save_current_step()
        self.ignore_signals()  # the checkpoint is saved, so a late signal must not change the exit code
        step = trainer.state.global_step
        name = signal.Signals(self.agreed_signal).name
        energy.record_kwh(record)
        record.update(stop={"signal": name, "step": step, "checkpoint": str(folder)})
        print_once(
            f"stopped by {name} at step {step} of {trainer.state.max_steps}; "
            f"resume with --resume_from_checkpoint {folder}, or as the same job"
        )
        wait_for_all_ranks()  # a launcher kills the other ranks as soon as one rank ends
        sys.exit(STOPPED)


class StopCallback(TrainerCallback):
    """Callback that checks after each step and each save whether to stop.

    It is called after the Trainer's own callback and overrides the decisions of that callback.
    """

    def __init__(self, stop: StopRequest, trainer: Any):
        """trainer: a WorkshopTrainer, which knows the step that it has saved."""
        self.stop = stop
        self.trainer = trainer

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.stop.training = True
        if state.global_step >= state.max_steps:
            print_once(f"step {state.global_step} was the last one, nothing is left to train")

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop.agree_to_stop():
            control.should_training_stop = True
            # At the end of an epoch the evaluation comes first, because its result belongs in the checkpoint
            control.should_save = not self.ends_epoch(state)

    def on_epoch_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        """Save and evaluate at a stop only if the epoch is complete.

        The Trainer also calls this method when a stop has interrupted the epoch.
        """
        if self.stop.agreed_signal:
            ends_epoch = self.ends_epoch(state)
            control.should_save = ends_epoch and self.trainer.saved_step != state.global_step
            control.should_evaluate = control.should_evaluate and ends_epoch
            control.should_log = control.should_log and ends_epoch

    def ends_epoch(self, state: TrainerState) -> bool:
        return state.global_step % self.trainer.steps_per_epoch == 0 or state.global_step >= state.max_steps

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if self.stop.agree_to_stop():
            control.should_training_stop = True
