"""Checkpoints: mark a saved one as complete, remove older ones, and find the one to resume from.

transformers resumes from the folder with the highest number, even if the job was killed while writing it. If the
optimizer's file is missing, it starts with a new optimizer. Here, a checkpoint gets the file `complete.json` once all
ranks have written their files, and a run resumes only from such a checkpoint. It must also belong to the same training,
and contain no code.
"""

import contextlib
import json
import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from datasets import Dataset
from pydantic import BaseModel, PositiveInt
from safetensors import SafetensorError, safe_open
from torch.serialization import add_safe_globals, get_unsafe_globals_in_checkpoint
from transformers import PreTrainedModel, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_pt_utils import safe_globals

from config import DEFAULTS, facts
from data_loader import tokens_hash
from distributed.collectives import print_once, rank, wait_for_all_ranks
from distributed.strategy import BY_NAME
from model import share_weights
from records.run_environment import strip_repository
from settings.command_line import LATEST
from settings.settings import Settings
from shared.errors import ENVIRONMENT, NO_CHECKPOINT, WorkshopError, remedy_for_write
from shared.files import check_readable
from shared.hub import short_reason
from shared.json_files import flatten_keys, read_checked, write_json
from shared.paths import CHECKPOINT_MARKER

# The keys of an FSDP2 config that determine the files of a checkpoint, with their defaults. PyTorch loads these files
# under any mesh, any wrapping and any strategy of FSDP2
FSDP2_FILES = {"version": 2, "state_dict_type": "FULL_STATE_DICT", "cpu_offload": False}
TORCH_FILES = {".pt", ".pth", ".bin"}
NEVER_LOADED = "training_args.bin"  # the Trainer writes it as information; it contains classes of many modules


# 1. Complete checkpoints


def checkpoint_folder(output_dir: str | Path | None, step: int) -> Path:
    return Path(output_dir or "output") / f"checkpoint-{step}"


class Marker(BaseModel, extra="allow"):
    """A checkpoint's marker: the values of `training_identity`, the step, and the name and size of each file.

    Only the values that another version might write in another way are checked.
    """

    world_size: PositiveInt
    strategy: Literal[tuple(BY_NAME)]  # type: ignore[valid-type]
    at_once: PositiveInt  # version 1.0.0, whose checkpoints have other counts, did not write it
    step: PositiveInt


def read_marker(folder: str | Path) -> dict:
    """Return the entries of a checkpoint's marker. Raise WorkshopError (exit code 4) if the file is unusable."""
    path = Path(folder) / CHECKPOINT_MARKER
    return read_checked(
        path, Marker, "marker of version 2 of the workshop", "resume from another checkpoint", NO_CHECKPOINT
    ).model_dump()


def is_complete(folder: Path) -> bool:
    """Return whether the folder has a marker, and each file has the size in the marker."""
    try:
        files = read_marker(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, WorkshopError):
        return False


def complete_checkpoints(places: list[Path]) -> list[Path]:
    return [folder for place in places for folder in place.glob("checkpoint-*") if is_complete(folder)]


def newest_first(folder: Path) -> float:
    """Sort key that puts the newest checkpoint first. The step cannot be the key: a resumed run repeats lower steps."""
    return -(folder / CHECKPOINT_MARKER).stat().st_mtime


# 2. Saving


class CheckpointCallback(TrainerCallback):
    """Callback that marks each saved checkpoint as complete, and then removes older checkpoints."""

    def __init__(self, trainer: Any, identity: dict):
        """trainer: a WorkshopTrainer. identity: the description of this training, which each checkpoint contains."""
        self.save_total_limit = trainer.args.save_total_limit
        trainer.args.save_total_limit = None  # the Trainer would remove checkpoints before the new one is complete
        self.identity = identity

    def on_save(self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        folder = checkpoint_folder(args.output_dir, state.global_step)
        wait_for_all_ranks()  # after this, all ranks have written their files
        if rank() == 0:
            with full_disk_errors(folder):
                mark_complete(folder, self.identity | {"step": state.global_step})
            print(f"checkpoint of step {state.global_step} is complete: {folder}", flush=True)
            self.remove_older(folder.parent, state.best_model_checkpoint)
        wait_for_all_ranks()

    def remove_older(self, output_dir: Path, best: str | None) -> None:
        found = sorted(complete_checkpoints([output_dir]), key=newest_first)
        for folder in found[self.save_total_limit :] if self.save_total_limit else []:
            if best is None or folder != Path(best):
                remove(folder)


def mark_complete(folder: Path, content: dict) -> None:
    """Let others read the weights, and write the marker file, which lists all files of the checkpoint."""
    share_weights(folder)
    paths = [path for path in folder.rglob("*") if path.is_file() and path.name != CHECKPOINT_MARKER]
    files = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    write_json(folder / CHECKPOINT_MARKER, content | {"files": files})


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
    (folder / CHECKPOINT_MARKER).unlink(missing_ok=True)
    shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def full_disk_errors(folder: str | Path) -> Iterator[None]:
    """Turn the libraries' exceptions for a full disk into WorkshopError (exit code 3)."""
    try:
        yield
    except (OSError, RuntimeError, SafetensorError) as error:
        if isinstance(error, RuntimeError) and not re.search("PytorchStreamWriter|inline_container", str(error)):
            raise
        what = f"is not complete: writing failed ({short_reason(error)})"
        remedy = f"{remedy_for_write(error)}, then resume from the last complete checkpoint (--resume_from_checkpoint)"
        raise WorkshopError(folder, what, remedy, ENVIRONMENT) from error


# 3. The checkpoint to resume from


def find_checkpoint(requested: str | None, output_dir: str, job_id: str) -> str | None:
    """Return the checkpoint to resume from.

    requested: a checkpoint, a folder with checkpoints, or `latest`. The newest checkpoint is taken. `latest` searches
    the folder of this run. Only if this folder has no checkpoints, not even incomplete ones, it searches the folders of
    other runs next to it.

    A job that Slurm has restarted resumes from its own newest checkpoint. If it has none, `requested` applies, as at
    the first start. Raise WorkshopError if a folder may not be read (exit code 3), or if a checkpoint is requested and
    none is found (exit code 4).
    """
    own = checkpoint_of_restarted_job(output_dir, job_id)
    if own:
        return str(own)
    place = Path(output_dir if requested in (None, LATEST) else requested)
    # A run without a checkpoint looks into the first two folders, too, before it writes there
    check_readable("results", output_dir, place)
    check_readable(*place.glob("checkpoint-*"))
    if requested is None:
        return None
    folders = [place, *place.glob("checkpoint-*")]
    existing = sorted(folder.name for folder in folders if folder.name.startswith("checkpoint-"))
    found = [folder for folder in folders if is_complete(folder)]
    if requested == LATEST and not existing:
        found = complete_checkpoints(sorted(place.parent.glob("*/")))
        print_once(f"no checkpoint in {place}: looking for one of the other runs in {place.parent}")
    if not found and (place / CHECKPOINT_MARKER).exists():
        read_marker(place)  # raises WorkshopError if the marker has other content
    if not found:
        what = f"no complete checkpoint in {place} (incomplete: {', '.join(existing) or 'none'})"
        remedy = "leave the flag out to start from the beginning, or name the checkpoint of another run"
        raise WorkshopError("--resume_from_checkpoint", what, remedy, NO_CHECKPOINT)
    return str(min(found, key=newest_first))


def checkpoint_of_restarted_job(output_dir: str, job_id: str) -> Path | None:
    """Return the newest checkpoint of this job if Slurm has restarted it, otherwise None."""
    if os.environ.get("SLURM_RESTART_COUNT", "0") in ("", "0"):
        return None
    own = [path for path in complete_checkpoints([Path(output_dir)]) if read_marker(path)["job_id"] == job_id]
    return min(own, key=newest_first, default=None)


# 4. The same training


def keep_global_batch(settings: Settings, output_dir: str, job_id: str, ranks: int) -> Settings:
    """Change the accumulation of a job that Slurm has restarted on another number of ranks, and return the settings.

    The global batch remains that of the job's checkpoint. If no accumulation gives this global batch, nothing changes,
    and `check_same_training` ends the run.
    """
    checkpoint = checkpoint_of_restarted_job(output_dir, job_id)
    if checkpoint is None:
        return settings
    at_once = settings.trainer.per_device_train_batch_size * ranks
    accumulation, rest = divmod(read_marker(checkpoint)["settings"]["global_batch"], at_once)
    requested = settings.trainer.gradient_accumulation_steps
    if rest or accumulation == requested:
        return settings
    trainer = replace(settings.trainer, gradient_accumulation_steps=accumulation)
    return replace(settings, trainer=trainer, requested_accumulation=requested)


def training_identity(job_id: str, settings: Settings, strategy: str, ranks: int, train_dataset: Dataset) -> dict:
    """Return the values that identify this training.

    Each checkpoint contains them, and a run compares them with its own values before it resumes. `at_once` is the
    number of questions that all ranks process at once: micro batch x ranks. `settings` has the flags, `config` the
    DeepSpeed or FSDP config, and `tokens` a hash of the training data. 2.0.0 compared `data`, the cache key, instead.
    """
    trainer = settings.trainer
    at_once = trainer.per_device_train_batch_size * ranks
    global_batch = at_once * trainer.gradient_accumulation_steps
    defining = {flag: strip_repository(v) for flag, v in settings.flat().items() if facts(flag).changes == "training"}
    content = {
        "job_id": job_id,
        "world_size": ranks,
        "strategy": strategy,
        "at_once": at_once,
        "save_strategy": trainer.save_strategy,
        "settings": defining | {"global_batch": global_batch},
        "config": flatten_keys(settings.deepspeed_config or settings.fsdp_config or {}),
        "data": train_dataset._fingerprint,
        "tokens": tokens_hash(train_dataset),
    }
    return json.loads(json.dumps(content, default=str))  # the form that reading the marker returns


def check_same_training(folder: str, identity: dict) -> None:
    """Raise WorkshopError (exit code 4) if settings differ from the checkpoint's. The message names each of them."""
    saved = read_marker(folder)
    if not any(name.startswith("rng_state") for name in saved["files"]):  # the Trainer saves it with the optimizer
        what = "was saved with --save_only_model, without the optimizer"
        raise WorkshopError(folder, what, "resume from another checkpoint", NO_CHECKPOINT)
    with_ranks = not all(BY_NAME[each["strategy"]].any_ranks for each in (saved, identity))
    before = compared_values(saved, with_ranks)
    now = compared_values(identity, with_ranks)
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    differences = [f"{name} was {before.get(name)}, is {now.get(name)}" for name in names]
    same_data = "tokens" if "tokens" in saved else "data"
    if not differences and saved[same_data] != identity[same_data]:
        differences = ["the training questions or their tokens differ"]
    if differences:
        what = f"is of another training: {', '.join(differences)}"
        raise WorkshopError(folder, what, remedy(names, saved, identity), NO_CHECKPOINT)


def compared_values(identity: dict, with_ranks: bool) -> dict[str, Any]:
    """Return the values that must equal the checkpoint's, by the names that error messages use.

    A knob that is younger than the checkpoint had its default value.
    """
    family = BY_NAME[identity["strategy"]].family
    config = identity["config"]
    values = DEFAULTS | identity["settings"] | {"strategy": family}
    found = {name: value for name, value in values.items() if facts(name).changes == "training"}
    if family == "FSDP2":
        config = {key: config.get(key, default) for key, default in FSDP2_FILES.items()}
        found.pop("activation_checkpointing")  # recomputed activations are the same
    if with_ranks:
        found["ranks"] = identity["world_size"]
    return found | {f"config {key}": value for key, value in config.items()}


def remedy(names: list[str], saved: dict, identity: dict) -> str:
    """Return what to do about differing values. names: their names in `compared_values`."""
    ranks, at_once = identity["world_size"], identity["at_once"]
    if "ranks" in names and not set(names) - {"ranks", "global_batch"}:
        kind = saved["strategy"].removeprefix("DeepSpeed ")
        return (
            f"a {kind} checkpoint has one part for each rank; start {saved['world_size']} ranks, or train with FSDP2, "
            "whose checkpoints fit any number"
        )
    if names == ["global_batch"]:
        accumulation, rest = divmod(saved["settings"]["global_batch"], at_once)
        if not rest:
            return f"set GRAD_ACC={accumulation}, which gives the same global batch on {ranks} rank(s)"
        return f"no GRAD_ACC gives the same global batch on {ranks} rank(s); lower BATCH_SIZE, or change the ranks"
    return "give the same settings, or leave --resume_from_checkpoint out to start from the beginning"


# 5. No code
#
# torch.save writes a pickle, and a pickle can call any function. The Trainer loads its own files with PyTorch's
# `weights_only`, which accepts tensors, plain values and a list of classes. DeepSpeed does not use `weights_only`, so
# forbid_code_in_checkpoints enforces it. (PyTorch itself reads the `.metadata` of a sharded FSDP checkpoint, which is
# also a pickle: see SECURITY.md.)


def forbid_code_in_checkpoints(with_deepspeed: bool) -> None:
    """Restrict torch.load in this process to tensors, plain values and the classes that a checkpoint needs.

    The environment variable overrides `weights_only=False` in any call of torch.load.
    """
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # if both are set, PyTorch refuses to load anything
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if with_deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        # Before 3.11.4, Python pickles a member of an enum as a call of getattr, which may not be loaded again
        ZeroStageEnum.__reduce_ex__ = lambda member, protocol: (ZeroStageEnum, (member.value,))
        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def check_contents(checkpoint: str, meta_model: PreTrainedModel) -> None:
    """Raise WorkshopError (exit code 4) if a file is damaged, contains a class that is not allowed, or does not fit.

    The Trainer would skip a weight that does not fit the model. Call this after `forbid_code_in_checkpoints`. It reads
    no tensors.
    """
    shapes = {name: list(weight.shape) for name, weight in meta_model.state_dict().items()}
    step = read_marker(checkpoint)["step"]
    for path in sorted(Path(checkpoint).rglob("*")):
        if what := find_fault(path, shapes, step):
            raise WorkshopError(path, what, "resume from a checkpoint that your own run wrote", NO_CHECKPOINT)


def find_fault(path: Path, shapes: dict[str, list[int]], step: int) -> str:
    """Return what is wrong with a file of a checkpoint, "" if nothing is. shapes: those of the model's weights."""
    try:
        if path.suffix in TORCH_FILES and path.name != NEVER_LOADED:
            with safe_globals():  # allows numpy's classes, which the Trainer needs to load the random states
                if foreign := get_unsafe_globals_in_checkpoint(path):
                    return f"contains {min(foreign)}, which is code, not data"
        elif path.suffix == ".safetensors":
            with safe_open(path, "pt") as file:
                for name in file.keys():  # noqa: SIM118 - the file itself is not iterable
                    if file.get_slice(name).get_shape() != shapes.get(name):
                        return f"contains {name}, which does not fit the model"
        elif path.name == TRAINER_STATE_NAME and TrainerState.load_from_json(str(path)).global_step != step:
            return f"is not of step {step}, which the marker names"
    except Exception as error:  # a damaged pickle can raise any exception
        return f"is damaged, or not a checkpoint file ({type(error).__name__}: {short_reason(error)})"
    return ""
