"""Checkpoints that are known to be complete, undamaged, and of the same training.

transformers resumes from the highest-numbered folder, even when the job was killed while writing it, and
starts with a fresh optimizer when that file is missing. Here every checkpoint that all ranks finished gets
the file `complete.json`, and only such a checkpoint is resumed from:

    job_id, world_size, strategy    who saved it
    step                    optimizer steps done
    settings, config, data  of the training: flags, DeepSpeed's or FSDP's config, a checksum of its tokens
    progress                what a resumed run counts on from, see Progress
    files                   name -> size, xxh3_64 (checksum)
"""

import contextlib
import dataclasses
import json
import math
import mmap
import os
import re
import shutil
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy
import xxhash
from datasets import Dataset
from transformers import PreTrainedModel, TrainerCallback

from config import LATEST, Options, parse_command_line, precision_name
from errors import ENVIRONMENT, NO_CHECKPOINT, WorkshopError
from json_files import write_json
from model import count_parameters
from parallel.distributed import gather_lists, rank, wait_for_everyone, world_size
from training.callbacks import TokenCounts, TrainSpeedCallback, clock
from training.flops import KINDS_OF_TOKENS
from training.record import from_repository

MARKER = "complete.json"
UNSHARDED = {"plain", "DDP"}  # each rank holds everything, so any number of ranks can go on
# What a file's name tells of the rank that wrote it: of the Trainer, DeepSpeed, and PyTorch for FSDP
RANK_IN_NAME = re.compile(r"^rng_state_(\d+)\.pth|pp_rank_(\d+)_|^__(\d+)_\d+\.distcp")
# Settings that a resumed run may have otherwise: they decide when something is done, or where it goes
MAY_CHANGE = re.compile(
    r"num_train_epochs|max_steps|(logging|log|save|eval)_(?!size|dataset).*|output_dir|run_name|report_to|em_f1.*|profile"
    r"|resume_from_checkpoint|ddp_timeout|disable_tqdm|dataloader_.*|per_device_(train|eval)_batch_size"
    r"|gradient_accumulation_steps|deepspeed|fsdp|fsdp_config"
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
    # defaults: checkpoints of versions that did not count them
    tokens: list[int] = field(default_factory=lambda: [0] * KINDS_OF_TOKENS)
    steady_tokens: list[int] = field(default_factory=lambda: [0] * KINDS_OF_TOKENS)

    @property
    def unlogged_loss(self) -> float:
        """This rank's; with another number of ranks the mean, which is what is logged of them."""
        if len(self.unlogged_losses) == world_size():
            return self.unlogged_losses[rank()]
        return sum(self.unlogged_losses) / len(self.unlogged_losses)


class CheckpointCallback(TrainerCallback):
    """Marks each saved checkpoint as complete, and only then removes the older ones."""

    def __init__(
        self,
        save_total_limit: int | None,
        marker: dict,
        trainer: Any,
        speed: TrainSpeedCallback,
        resumed_from: str | None,
    ):
        """marker: what is known of every checkpoint of this run. trainer: a WorkshopTrainer."""
        self.save_total_limit = save_total_limit
        self.marker = marker
        self.trainer = trainer
        self.speed = speed
        self.resumed_from = resumed_from

    def on_train_begin(self, args, state, control, **kwargs):
        self.started = clock()
        saved = read_marker(self.resumed_from) if self.resumed_from else {}
        self.trainer.saved_step = saved.get("step", 0)
        if "progress" in saved:
            # null: a loss that was not finite
            progress = Progress(**{k: float("nan") if v is None else v for k, v in saved["progress"].items()})
            self.trainer.go_on_from(progress)
            tokens = TokenCounts(progress.tokens, progress.steady_tokens)
            self.speed.go_on_from(progress.steady_steps, progress.steady_seconds, tokens)

    def on_save(self, args, state, control, **kwargs):
        unlogged = [loss for (loss,) in gather_lists([float(self.trainer._tr_loss)])]
        tokens = self.speed.token_counts()
        progress = Progress(
            seconds=self.trainer.earlier_seconds + clock() - self.started,
            logged_loss=self.trainer._total_loss_scalar,
            last_logged_step=self.trainer._globalstep_last_logged,
            unlogged_losses=unlogged,
            steady_steps=self.speed.steps,
            steady_seconds=self.speed.seconds,
            tokens=tokens.whole,
            steady_tokens=tokens.steady,
        )
        folder = checkpoint_folder(args.output_dir, state.global_step)
        content = self.marker | {"step": state.global_step, "progress": dataclasses.asdict(progress)}
        mark_complete(folder, content)
        self.trainer.saved_step = state.global_step
        if rank() == 0:
            print(f"checkpoint of step {state.global_step} is complete: {folder}", flush=True)
            self.remove_older(Path(args.output_dir), state.best_model_checkpoint)
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
            if read_marker(folder).get("settings", {}).get("save_strategy") == "no":
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


def marker_of(job_id: str, options: Options, strategy: str, ranks: int, train_dataset: Dataset) -> dict:
    """What is known of every checkpoint of a run: by this, a later one sees whether it can go on from it."""
    config = options.deepspeed_config if options.deepspeed_config is not None else options.fsdp_config
    return {
        "job_id": job_id,
        "world_size": ranks,
        "strategy": strategy,
        "settings": {flag: from_repository(value) for flag, value in options.settings().items()}
        | {"global_batch": global_batch(options.values, ranks)},
        "config": config or {},
        "data": checksum_of_tokens(train_dataset),
    }


def global_batch(values: dict, ranks: int) -> int:
    return values["per_device_train_batch_size"] * values["gradient_accumulation_steps"] * ranks


def checksum_of_tokens(dataset: Dataset) -> str:
    """xxh3_64 of all that the model will see: input_ids and labels, whatever file they came from."""
    digest = xxhash.xxh3_64()
    for column in ("length", "input_ids", "labels"):
        values = dataset.with_format("arrow")[column][:].combine_chunks()
        if column != "length":
            values = values.flatten()
        digest.update(numpy.ascontiguousarray(values.to_numpy(zero_copy_only=False)).tobytes())
    return digest.hexdigest()


def mark_complete(folder: Path, content: dict) -> None:
    """Write the marker once every rank has written its files. Collective: each rank reads back its own."""
    wait_for_everyone()
    if rank() == 0:
        (folder / MARKER).unlink(missing_ok=True)  # of a run that was resumed before this step and writes it again
    files: dict = {}
    for (part,) in gather_lists([{name: described(folder / name) for name in own_files(folder)}]):
        files |= part
    if rank() == 0:
        try:
            write_json(folder / MARKER, content | {"files": files})
        except OSError as error:
            way_out = "free disk space or quota"
            raise WorkshopError(folder, f"is not complete ({error.strerror})", way_out, ENVIRONMENT) from error


def own_files(folder: Path) -> list[str]:
    """Names of the files that this rank wrote: those with no rank in their name are rank 0's."""
    names = [str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()]
    return [name for name in names if not Path(name).name.startswith(MARKER.split(".")[0]) and writer(name) == rank()]


def writer(name: str) -> int:
    match = RANK_IN_NAME.search(Path(name).name)
    number = int(next(filter(None, match.groups()))) if match else 0
    return number if number < world_size() else 0


def described(path: Path) -> dict:
    return {"size": path.stat().st_size, "xxh3_64": checksum(path)}


def checksum(path: Path) -> str:
    digest = xxhash.xxh3_64()
    with path.open("rb") as file:
        if os.fstat(file.fileno()).st_size:
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                digest.update(content)
    return digest.hexdigest()


# Finding


def read_marker(folder: str | Path) -> dict:
    """The marker, {} where there is none that can be read."""
    try:
        content = json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return content if isinstance(content, dict) else {}


def is_complete(folder: Path) -> bool:
    try:
        files = read_marker(folder)["files"]
        return all((folder / name).stat().st_size == file["size"] for name, file in files.items())
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return False


def find_checkpoint(
    requested: str | None, output_dir: str, ranks: int, strategy: str, restarted_job: str | None
) -> str | None:
    """The complete checkpoint to go on from: `requested` itself, the latest in that folder, or for `latest` the
    latest of this run or, when it has none, of the other runs beside it.

    restarted_job: id of a job that Slurm has started again. It goes on from its own latest checkpoint; when it has
    none, it begins as it did the first time.
    Raises WorkshopError (exit code 4) when there is none, when it is damaged, or when other ranks or another way of
    sharding saved it. Collective.
    """
    if restarted_job and (found := latest_undamaged(Path(output_dir), restarted_job)):
        return str(check_fits(found, ranks, strategy))
    if requested is None:
        return None
    if requested == LATEST:
        places = [Path(output_dir)]
        if not latest_complete(places):
            places = sorted(Path(output_dir).parent.glob("*/"))
    elif (Path(requested) / "trainer_state.json").exists() or re.search(r"checkpoint-\d+/?$", requested):
        if not is_complete(Path(requested)):
            raise WorkshopError(
                requested,
                "is no complete checkpoint",
                f"choose a folder with a {MARKER} whose files are all there",
                NO_CHECKPOINT,
            )
        return check_undamaged(check_fits(Path(requested), ranks, strategy))
    else:
        places = [Path(requested)]
    found = latest_complete(places)
    if not found:
        where = output_dir if requested == LATEST else requested
        raise WorkshopError(
            "--resume_from_checkpoint",
            f"no complete checkpoint in {where}",
            "leave the flag out to start anew",
            NO_CHECKPOINT,
        )
    return check_undamaged(check_fits(found, ranks, strategy))


def latest_complete(places: list[Path]) -> Path | None:
    return min(complete_ones(places), key=age, default=None)


def latest_undamaged(output_dir: Path, job_id: str) -> Path | None:
    """Of this job. Nobody is there to choose another one when Slurm starts a job again. Collective."""
    own = [folder for folder in complete_ones([output_dir]) if read_marker(folder).get("job_id") == job_id]
    for folder in sorted(own, key=age):
        damaged = damaged_files(folder)
        if not damaged:
            return folder
        if rank() == 0:
            print(f"{damaged[0]} was changed since it was saved: going on from an older checkpoint", flush=True)
    return None


def complete_ones(places: list[Path]) -> list[Path]:
    return [folder for place in places for folder in place.glob("checkpoint-*") if is_complete(folder)]


def age(folder: Path) -> float:
    """Sorts newest first. Not the step number: a resumed run may go through lower ones again."""
    try:
        return -(folder / MARKER).stat().st_mtime
    except OSError:  # another run removes it
        return 0.0


def check_fits(folder: Path, ranks: int, strategy: str) -> Path:
    saved = read_marker(folder)
    if {saved["strategy"], strategy} <= UNSHARDED:
        return folder
    if (saved["strategy"], saved["world_size"]) != (strategy, ranks):
        raise WorkshopError(
            folder,
            f"saved by {saved['world_size']} ranks with {saved['strategy']}, this run has {ranks} with {strategy}",
            "resume with the same number of ranks and the same config",
            NO_CHECKPOINT,
        )
    return folder


def check_undamaged(folder: Path) -> str:
    """Compare the files with their checksums. Raises WorkshopError (exit code 4) on every rank. Collective."""
    damaged = damaged_files(folder)
    if not damaged:
        return str(folder)
    others = [other for other in sorted(complete_ones([folder.parent]), key=age) if other != folder]
    way_out = "leave --resume_from_checkpoint out to start anew"
    if others:
        way_out = f"go on from the one before: --resume_from_checkpoint {others[0]}"
    raise WorkshopError(damaged[0], "was changed since it was saved", way_out, NO_CHECKPOINT)


def damaged_files(folder: Path) -> list[Path]:
    """Files whose content is not what was saved. Collective: each rank reads those that it will load first."""
    files = read_marker(folder)["files"]
    own = [name for name in files if writer(name) == rank()]
    damaged = [name for name in own if checksum(folder / name) != files[name].get("xxh3_64")]
    return [folder / name for part in gather_lists(damaged) for name in part]


# Comparing


def check_same_training(folder: str, options: Options, marker: dict) -> None:
    """Raises WorkshopError (exit code 4) naming each setting in which this run differs from the checkpoint's."""
    saved = read_marker(folder)
    if "settings" not in saved:
        if rank() == 0:
            print(f"{folder} does not tell its settings: make sure that they are the same", flush=True)
        return
    defaults = parse_command_line("", [], environment={}).values
    before = flattened(saved["settings"]) | {f"config {key}": v for key, v in flattened(saved["config"]).items()}
    now = flattened(marker["settings"]) | {f"config {key}": v for key, v in flattened(marker["config"]).items()}
    differences = []
    for name in sorted({*before, *now}):
        old = before.get(name, defaults.get(name))
        new = now.get(name, options.values.get(name))
        if not MAY_CHANGE.fullmatch(name) and comparable(old) != comparable(new):
            differences.append(f"{name} was {old}, is {new}")
    if not differences and saved["data"] != marker["data"]:
        differences = ["the training questions or their tokens are others"]
    if differences:
        way_out = "give the same settings, or leave --resume_from_checkpoint out to start anew"
        raise WorkshopError(folder, f"is of another training: {', '.join(differences)}", way_out, NO_CHECKPOINT)


def flattened(content: dict, prefix: str = "") -> dict[str, Any]:
    """``{"a": {"b": 1}}`` as ``{"a.b": 1}``."""
    flat: dict[str, Any] = {}
    for key, value in content.items():
        flat |= flattened(value, f"{prefix}{key}.") if isinstance(value, dict) else {f"{prefix}{key}": value}
    return flat


def comparable(value: object) -> object:
    """As it comes back from a JSON file."""
    return json.loads(json.dumps(value, default=str))


# Before the training


def check_room(output_dir: str, options: Options, skeleton: PreTrainedModel, strategy: str, keep: int | None) -> None:
    """Find out before the model is loaded whether the run can save. Raises WorkshopError (exit code 3).

    skeleton: the model without memory for its weights. keep: checkpoints that stay (--save_total_limit); the one before
    goes when the new one is complete.
    """
    folder = Path(output_dir).absolute()
    place = next(path for path in (folder, *folder.parents) if path.is_dir())
    test = place / f".write-test-{os.getpid()}"
    try:
        test.write_bytes(b"x")
        test.unlink()
    except OSError as error:
        raise WorkshopError(place, f"cannot be written ({error.strerror})", "give another --output_dir, or free space",
                            ENVIRONMENT) from error  # fmt: skip
    if options.values["save_strategy"] == "no":
        return
    one, model = bytes_to_save(options, skeleton, strategy)
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


def bytes_to_save(options: Options, skeleton: PreTrainedModel, strategy: str) -> tuple[int, int]:
    """Bytes of one checkpoint, and of the model at the end. Of optimizers, the state of Adam is known."""
    parameters = count_parameters(skeleton)
    in_16_bit = precision_name(options.values) != "fp32"
    kind = "FSDP" if strategy.startswith("FSDP") else strategy
    checkpoint = BYTES_OF_CHECKPOINT[kind][in_16_bit] * parameters
    if "adam" not in getattr(options.values["optim"], "value", options.values["optim"]):
        checkpoint -= BYTES_OF_ADAM * parameters
    weight = 2 if in_16_bit and kind.startswith("DeepSpeed") else 4
    tied_head = weight * (sum(saved.numel() for saved in skeleton.state_dict().values()) - parameters)
    heads = TIED_HEADS.get(kind, 0)
    return checkpoint + heads * tied_head, weight * parameters + min(heads, 1) * tied_head
