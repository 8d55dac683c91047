"""Checkpoints that are known to be complete, and of the same training.

transformers resumes from the highest-numbered folder, even when the job was killed while writing it, and
starts with a fresh optimizer when that file is missing. Here every checkpoint that all ranks finished gets
the file `complete.json`, and only such a checkpoint is resumed from:

    job_id, world_size, strategy    who saved it
    step                    optimizer steps done
    settings, config, data  of the training: flags, DeepSpeed's or FSDP's config, the name of its tokens in the cache
    progress                what a resumed run counts on from, see Progress
    files                   name -> size
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from datasets import Dataset
from safetensors import SafetensorError
from transformers import PreTrainedModel, TrainerCallback

from distributed.collectives import gather_lists, rank, wait_for_everyone, world_size
from model import count_parameters
from records.writer import from_repository, restarted_by_slurm
from settings.command_line import LATEST, Options, precision_name
from shared.errors import ENVIRONMENT, NO_CHECKPOINT, WorkshopError
from shared.json_files import leaves_of, write_json
from training.speed import TrainSpeedCallback, clock

MARKER = "complete.json"
UNSHARDED = {"plain", "DDP"}  # each rank holds everything, so any number of ranks can go on
# Settings that a resumed run may have otherwise: they decide when something is done, or where it goes
MAY_CHANGE = re.compile(
    r"num_train_epochs|max_steps|(logging|log|save|eval)_(?!size|dataset).*|output_dir|run_name|report_to|em_f1.*|profile"
    r"|resume_from_checkpoint|ddp_timeout|ddp_find_unused_parameters|disable_tqdm|dataloader_.*|per_device_(train|eval)_batch_size"
    r"|gradient_accumulation_steps|deepspeed|fsdp|fsdp_config|local_rank|use_cpu"
)


BYTES_OF_ADAM = 8  # two moments in fp32
# Per parameter of a checkpoint with Adam: of a training in fp32, and in 16 bit
BYTES_OF_CHECKPOINT = {
    "plain": (12, 12),
    "DDP": (12, 12),
    "FSDP": (16, 16),  # the weights twice
    "DeepSpeed ZeRO-0": (16, 16),  # from here on the weights twice, in the precision; in 16 bit fp32 masters, too
    "DeepSpeed ZeRO-1": (20, 16),
    "DeepSpeed ZeRO-2": (20, 16),
    "DeepSpeed ZeRO-3": (16, 14),  # the weights once
}
# How often a checkpoint holds a head that is tied to the embedding besides it; the other strategies save it once
TIED_HEADS = {"FSDP": 2, "DeepSpeed ZeRO-0": 1, "DeepSpeed ZeRO-1": 1, "DeepSpeed ZeRO-2": 1}


@dataclass
class Progress:
    """What a run has counted up to a checkpoint. Losses are sums over the optimizer steps."""

    seconds: float  # of training, in this run and those before
    logged_loss: float
    last_logged_step: int
    unlogged_losses: list[float]  # of each rank, since then
    steady_steps: int
    steady_seconds: float
    tokens: list[list[int]]  # in the whole training, and in its steady steps

    @property
    def unlogged_loss(self) -> float:
        """This rank's; with another number of ranks the mean, which is what is logged of them."""
        if len(self.unlogged_losses) == world_size():
            return self.unlogged_losses[rank()]
        return sum(self.unlogged_losses) / len(self.unlogged_losses)


class CheckpointCallback(TrainerCallback):
    """Marks each saved checkpoint as complete, and only then removes the older ones."""

    def __init__(self, trainer: Any, identity: dict, speed: TrainSpeedCallback, resumed_from: str | None):
        """trainer: a WorkshopTrainer. identity: what is known of every checkpoint of this run."""
        self.trainer = trainer
        self.save_total_limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # the Trainer would remove older ones before the new one is complete
        self.identity = identity
        self.speed = speed
        self.resumed_from = resumed_from

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = clock()
        if self.resumed_from:
            saved = read_marker(self.resumed_from)
            self.trainer.saved_step = saved["step"]
            progress = Progress(**saved["progress"])
            self.trainer.go_on_from(progress)
            self.speed.go_on_from(progress.steady_steps, progress.steady_seconds, progress.tokens)

    def on_save(self, args, state, control, **kwargs):
        unlogged = [loss for (loss,) in gather_lists([float(self.trainer._tr_loss)])]
        progress = Progress(
            seconds=self.trainer.earlier_seconds + clock() - self.started,
            logged_loss=self.trainer._total_loss_scalar,
            last_logged_step=self.trainer._globalstep_last_logged,
            unlogged_losses=unlogged,
            steady_steps=self.speed.steps,
            steady_seconds=self.speed.seconds,
            tokens=self.speed.all_tokens(),
        )
        folder = checkpoint_folder(args.output_dir, state.global_step)
        wait_for_everyone()  # each rank has written its files
        if rank() == 0:
            content = self.identity | {"step": state.global_step, "progress": dataclasses.asdict(progress)}
            with full_disk_errors(folder):
                mark_complete(folder, content)
            print(f"checkpoint of step {state.global_step} is complete: {folder}", flush=True)
            self.remove_older(Path(args.output_dir), state.best_model_checkpoint)
        self.trainer.saved_step = state.global_step
        wait_for_everyone()

    def remove_older(self, output_dir: Path, best: str | None) -> None:
        newest_first = sorted(complete_ones([output_dir]), key=age)
        for folder in newest_first[self.save_total_limit :] if self.save_total_limit else []:
            if best is None or folder != Path(best):
                remove(folder)


def remove_checkpoints_of_stops(output_dir: str | Path) -> None:
    """Remove what a run that saves nothing saved at its stops, and the folder if nothing else is in it."""
    if rank() == 0:
        for folder in complete_ones([Path(output_dir)]):
            if read_marker(folder)["save_strategy"] == "no":
                remove(folder)
        with contextlib.suppress(OSError):
            Path(output_dir).rmdir()


def remove(folder: Path) -> None:
    """A file that another node holds open may stay for a while: what is left is no checkpoint any more."""
    (folder / MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


# Writing


def checkpoint_folder(output_dir: str | Path | None, step: int) -> Path:
    return Path(output_dir or "output") / f"checkpoint-{step}"


def identity_of(job_id: str, options: Options, strategy: str, ranks: int, train_dataset: Dataset) -> dict:
    """What is known of every checkpoint of a run: by this, a later one sees whether it can go on from it."""
    values = options.values
    global_batch = values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * ranks
    settings = {flag: from_repository(value) for flag, value in values.items() if not MAY_CHANGE.fullmatch(flag)}
    content = {
        "job_id": job_id,
        "world_size": ranks,
        "strategy": strategy,
        "save_strategy": values["save_strategy"],
        "settings": settings | {"global_batch": global_batch},
        "config": leaves_of(options.deepspeed_config or options.fsdp_config or {}),
        "data": train_dataset._fingerprint,
    }
    return json.loads(json.dumps(content, default=str))  # as it will be read back


@contextlib.contextmanager
def full_disk_errors(folder: str | Path) -> Iterator[None]:
    """Turns what the libraries raise when a disk is full into one line. Raises WorkshopError (exit code 3)."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        reason = str(error).splitlines()[0]
        disk = isinstance(error, OSError | SafetensorError) or "PytorchStreamWriter" in str(error)
        if not disk and "inline_container" not in str(error):
            raise
        way_out = "free disk space or quota, then --resume_from_checkpoint goes on from the last complete checkpoint"
        raise WorkshopError(folder, f"is not complete, writing failed ({reason})", way_out, ENVIRONMENT) from error


def mark_complete(folder: Path, content: dict) -> None:
    """Write the marker, which lists all files that are there."""
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != MARKER]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    write_json(folder / MARKER, content | {"files": files})


# Finding


def read_marker(folder: str | Path) -> dict:
    return json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))


def step_of(checkpoint: str) -> int:
    return read_marker(checkpoint)["step"]


def is_complete(folder: Path) -> bool:
    """Whether there is a marker, and each of its files is as large as it says."""
    try:
        files = read_marker(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def find_checkpoint(requested: str | None, output_dir: str, job_id: str) -> str | None:
    """The complete checkpoint to go on from: `requested` itself, the latest in that folder, or for `latest` the
    latest of this run or, when it has none, of the other runs beside it.

    A job that Slurm has started again goes on from its own latest checkpoint. When it has none, it begins as it did the
    first time. Raises WorkshopError (exit code 4) when there is none.
    """
    if restarted_by_slurm():
        own = [path for path in complete_ones([Path(output_dir)]) if read_marker(path)["job_id"] == job_id]
        if own:
            return str(min(own, key=age))
    if requested is None:
        return None
    if requested == LATEST:
        found = complete_ones([Path(output_dir)]) or complete_ones(sorted(Path(output_dir).parent.glob("*/")))
    elif (Path(requested) / MARKER).exists() or re.search(r"checkpoint-\d+/?$", requested):
        if not is_complete(Path(requested)):
            way_out = f"choose a folder with a {MARKER} whose files are all there"
            raise WorkshopError(requested, "is no complete checkpoint", way_out, NO_CHECKPOINT)
        found = [Path(requested)]
    else:
        found = complete_ones([Path(requested)])
    if not found:
        what = f"no complete checkpoint in {output_dir if requested == LATEST else requested}"
        way_out = "leave the flag out to start anew"
        raise WorkshopError("--resume_from_checkpoint", what, way_out, NO_CHECKPOINT)
    return str(min(found, key=age))


def complete_ones(places: list[Path]) -> list[Path]:
    return [folder for place in places for folder in place.glob("checkpoint-*") if is_complete(folder)]


def age(folder: Path) -> float:
    """Sorts newest first. Not the step number: a resumed run may go through lower ones again."""
    return -(folder / MARKER).stat().st_mtime


def check_same_training(folder: str, identity: dict) -> None:
    """Raises WorkshopError (exit code 4) naming each setting in which this run differs from the checkpoint's."""
    saved = read_marker(folder)
    sharded = not {saved["strategy"], identity["strategy"]} <= UNSHARDED
    before = defining(saved, sharded)
    now = defining(identity, sharded)
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    differences = [f"{name} was {before.get(name)}, is {now.get(name)}" for name in names]
    if not differences and saved["data"] != identity["data"]:
        differences = ["the training questions or their tokens are others"]
    if differences:
        way_out = "give the same settings, or leave --resume_from_checkpoint out to start anew"
        raise WorkshopError(folder, f"is of another training: {', '.join(differences)}", way_out, NO_CHECKPOINT)


def defining(identity: dict, sharded: bool) -> dict[str, Any]:
    """What a training must have as the checkpoint has it, by the names that an error gives to it."""
    found = identity["settings"] | {f"config {key}": value for key, value in identity["config"].items()}
    if sharded:
        found |= {"strategy": identity["strategy"], "ranks": identity["world_size"]}
    return found


# Before the training


def check_room(output_dir: str, options: Options, meta_model: PreTrainedModel, strategy: str, keep: int | None) -> None:
    """Find out before the model is loaded whether the run can save. Raises WorkshopError (exit code 3).

    meta_model: the model without memory for its weights. keep: checkpoints that stay (--save_total_limit); the one
    before goes when the new one is complete.
    """
    if rank() != 0:
        return
    folder = Path(output_dir).absolute()
    place = next(path for path in (folder, *folder.parents) if path.exists())
    if not (place.is_dir() and os.access(place, os.W_OK)):
        raise WorkshopError(place, "cannot be written", "give another --output_dir", ENVIRONMENT)
    if options.values["save_strategy"] == "no":
        return
    one, model = bytes_to_save(options, meta_model, strategy)
    at_once = (keep or 1) + 1
    if options.values["save_strategy"] == "epoch" and options.values["max_steps"] < 0:
        at_once = min(at_once, math.ceil(options.values["num_train_epochs"]))
    there = len(complete_ones([folder])[:keep]) * one  # each goes when a new one is complete
    free = shutil.disk_usage(place).free + there
    if one * at_once + model > free:
        gib = 2**30
        what = f"{free / gib:.1f} GiB free, {at_once} checkpoint(s) of {one / gib:.1f} GiB will be there at once"
        what += f", and a model of {model / gib:.1f}"
        raise WorkshopError(place, what, "free space, give another --output_dir, or --save_strategy no", ENVIRONMENT)


def bytes_to_save(options: Options, meta_model: PreTrainedModel, strategy: str) -> tuple[int, int]:
    """Bytes of one checkpoint, and of the model at the end. Of optimizers, the state of Adam is known."""
    parameters = count_parameters(meta_model)
    in_16_bit = precision_name(options.values) != "fp32"
    kind = "FSDP" if strategy.startswith("FSDP") else strategy
    checkpoint = BYTES_OF_CHECKPOINT[kind][in_16_bit] * parameters
    if "adam" not in getattr(options.values["optim"], "value", options.values["optim"]):
        checkpoint -= BYTES_OF_ADAM * parameters
    weight = 2 if in_16_bit and kind.startswith("DeepSpeed") else 4
    tied_head = weight * (sum(saved.numel() for saved in meta_model.state_dict().values()) - parameters)
    heads = TIED_HEADS.get(kind, 0)
    return checkpoint + heads * tied_head, weight * parameters + min(heads, 1) * tied_head
