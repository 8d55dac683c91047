"""Mark a checkpoint as complete once all ranks have written their files, then remove older checkpoints."""

import contextlib
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from transformers import TrainerCallback, TrainerControl, TrainerState, TrainingArguments

from distributed.collectives import gather_lists, rank, wait_for_all_ranks
from model import share_weights
from shared.errors import ENVIRONMENT, WorkshopError, remedy_for_write
from shared.json_files import write_json
from training.find_checkpoints import (
    MARKER,
    Progress,
    checkpoint_folder,
    complete_checkpoints,
    newest_first,
    read_marker,
)
from training.speed import TrainSpeedCallback, clock


class CheckpointCallback(TrainerCallback):
    """Callback that marks each saved checkpoint as complete, and then removes older checkpoints."""

    def __init__(self, trainer: Any, identity: dict, speed: TrainSpeedCallback, resumed_from: str | None):
        """trainer: a WorkshopTrainer. identity: the description of this training, which each checkpoint contains."""
        self.trainer = trainer
        self.save_total_limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # the Trainer would remove checkpoints before the new one is complete
        self.identity = identity
        self.speed = speed
        self.resumed_from = resumed_from

    def on_train_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any
    ) -> None:
        self.started = clock()
        if self.resumed_from:
            saved = read_marker(self.resumed_from)
            self.trainer.saved_step = saved["step"]
            progress = Progress.model_validate(saved["progress"])
            self.trainer.resume_counts(progress)
            self.speed.resume_counts(
                progress.steady_steps, progress.steady_seconds, progress.tokens, progress.steady_joules
            )

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        sums = self.trainer._tr_loss, self.trainer.unlogged_not_finite, self.trainer.bad_steps
        unlogged, not_finite, bad_steps = zip(*gather_lists([float(each) for each in sums]), strict=True)
        progress = Progress(
            seconds=self.trainer.earlier_seconds + clock() - self.started,
            logged_loss=self.trainer._total_loss_scalar,
            last_logged_step=self.trainer._globalstep_last_logged,
            unlogged_losses=[*unlogged],
            unlogged_not_finite=sum(not_finite),
            bad_steps=sum(bad_steps) / len(bad_steps),
            steady_steps=self.speed.steps,
            steady_seconds=self.speed.seconds,
            tokens=self.speed.all_tokens(),
            steady_joules=[*self.speed.all_joules()],
        )
        folder = checkpoint_folder(args.output_dir, state.global_step)
        wait_for_all_ranks()  # after this, all ranks have written their files
        if rank() == 0:
            content = self.identity | {"step": state.global_step, "progress": progress.model_dump()}
            with full_disk_errors(folder):
                mark_complete(folder, content)
            print(f"checkpoint of step {state.global_step} is complete: {folder}", flush=True)
            self.remove_older(folder.parent, state.best_model_checkpoint)
        self.trainer.saved_step = state.global_step
        wait_for_all_ranks()

    def remove_older(self, output_dir: Path, best: str | None) -> None:
        found = sorted(complete_checkpoints([output_dir]), key=newest_first)
        for folder in found[self.save_total_limit :] if self.save_total_limit else []:
            if best is None or folder != Path(best):
                remove(folder)


def mark_complete(folder: Path, content: dict) -> None:
    """Let others read the weights, and write the marker file, which lists all files of the checkpoint."""
    share_weights(folder)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    write_json(folder / MARKER, content | {"files": files})


def remove_stop_checkpoints(output_dir: str | Path) -> None:
    """Remove the checkpoints that a run with SAVE_STRATEGY=no saved at its stops."""
    if rank() == 0:
        for folder in complete_checkpoints([Path(output_dir)]):
            if read_marker(folder)["save_strategy"] == "no":
                remove(folder)


def remove(folder: Path) -> None:
    """Remove a checkpoint, its marker first.

    Files that another node holds open may remain for a while. Without the marker they do not count as a checkpoint.
    """
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def full_disk_errors(folder: str | Path) -> Iterator[None]:
    """Turn the libraries' exceptions for a full disk into WorkshopError (exit code 3)."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        disk = isinstance(error, OSError | SafetensorError) or "PytorchStreamWriter" in str(error)
        if not disk and "inline_container" not in str(error):
            raise
        remedy = f"{remedy_for_write(error)}, then resume from the last complete checkpoint (--resume_from_checkpoint)"
        raise WorkshopError(folder, f"is not complete: writing failed ({reason})", remedy, ENVIRONMENT) from error
