"""Find the checkpoint to resume from. It must be complete, belong to the same training, and contain no code.

transformers resumes from the folder with the highest number, even if the job was killed while writing it. If the
optimizer's file is missing, it starts with a new optimizer. Here, a checkpoint gets the file `complete.json` once all
ranks have written their files (save_checkpoints.py), and a run resumes only from such a checkpoint. The file contains:

    job_id, world_size, strategy    the run that saved the checkpoint
    step                    number of optimizer steps
    settings, config, data  the training: its flags, the DeepSpeed or FSDP config, and the cache key of its tokens
    progress                the counts that a resumed run continues, see Progress
    files                   name -> size
"""

import json
import os
import re
from pathlib import Path
from typing import Any

from datasets import Dataset
from torch.serialization import add_safe_globals, get_unsafe_globals_in_checkpoint
from transformers.trainer_pt_utils import safe_globals

from records.run_environment import strip_repository
from settings.command_line import LATEST
from settings.settings import Settings
from shared.errors import NO_CHECKPOINT, WorkshopError
from shared.json_files import flatten_keys

MARKER = "complete.json"
UNSHARDED = {"plain", "DDP"}  # each rank holds everything, so any number of ranks can resume
# Flags that may differ in a resumed run, because they only decide when something is done or where it is stored
CHANGEABLE_FLAGS = re.compile(
    r"num_train_epochs|max_steps|(logging|log|save|eval)_(?!size|dataset).*|output_dir|run_name|report_to|em_f1.*|show|profile"
    r"|resume_from_checkpoint|ddp_timeout|ddp_find_unused_parameters|disable_tqdm|dataloader_.*|per_device_(train|eval)_batch_size"
    r"|gradient_accumulation_steps|deepspeed|fsdp|fsdp_config|local_rank|use_cpu"
)
TORCH_FILES = {".pt", ".pth", ".bin"}
NEVER_LOADED = "training_args.bin"  # the Trainer writes it as information; it contains classes of many modules


# 1. Complete checkpoints


def checkpoint_folder(output_dir: str | Path | None, step: int) -> Path:
    return Path(output_dir or "output") / f"checkpoint-{step}"


def read_marker(folder: str | Path) -> dict:
    return json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))


def is_complete(folder: Path) -> bool:
    """Return whether the folder has a marker, and each file has the size in the marker."""
    try:
        files = read_marker(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def complete_checkpoints(places: list[Path]) -> list[Path]:
    return [folder for place in places for folder in place.glob("checkpoint-*") if is_complete(folder)]


def newest_first(folder: Path) -> float:
    """Sort key that puts the newest checkpoint first. The step cannot be the key: a resumed run repeats lower steps."""
    return -(folder / MARKER).stat().st_mtime


def find_checkpoint(requested: str | None, output_dir: str, job_id: str) -> str | None:
    """Return the checkpoint to resume from.

    requested: a checkpoint, a folder with checkpoints, or `latest`. The newest checkpoint is taken. `latest` searches
    the folder of this run first, then the folders of other runs next to it.

    A job that Slurm has restarted resumes from its own newest checkpoint. If it has none, `requested` applies, as at
    the first start. Raise WorkshopError (exit code 4) if a checkpoint is requested and none is found.
    """
    if os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0"):
        own = [path for path in complete_checkpoints([Path(output_dir)]) if read_marker(path)["job_id"] == job_id]
        if own:
            return str(min(own, key=newest_first))
    if requested is None:
        return None
    if requested == LATEST:
        found = complete_checkpoints([Path(output_dir)]) or complete_checkpoints(
            sorted(Path(output_dir).parent.glob("*/"))
        )
    elif (Path(requested) / MARKER).exists() or re.search(r"checkpoint-\d+/?$", requested):
        if not is_complete(Path(requested)):
            way_out = f"choose a folder with a {MARKER} and all files that it lists"
            raise WorkshopError(requested, "is not a complete checkpoint", way_out, NO_CHECKPOINT)
        found = [Path(requested)]
    else:
        found = complete_checkpoints([Path(requested)])
    if not found:
        what = f"no complete checkpoint in {output_dir if requested == LATEST else requested}"
        way_out = "leave the flag out to start from the beginning"
        raise WorkshopError("--resume_from_checkpoint", what, way_out, NO_CHECKPOINT)
    return str(min(found, key=newest_first))


# 2. The same training


def training_identity(job_id: str, settings: Settings, strategy: str, ranks: int, train_dataset: Dataset) -> dict:
    """Return the values that identify this training.

    Each checkpoint contains them, and a run compares them with its own values before it resumes.
    """
    trainer = settings.trainer
    global_batch = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * ranks
    defining = {
        flag: strip_repository(v) for flag, v in settings.flat().items() if not CHANGEABLE_FLAGS.fullmatch(flag)
    }
    content = {
        "job_id": job_id,
        "world_size": ranks,
        "strategy": strategy,
        "save_strategy": trainer.save_strategy,
        "settings": defining | {"global_batch": global_batch},
        "config": flatten_keys(settings.deepspeed_config or settings.fsdp_config or {}),
        "data": train_dataset._fingerprint,
    }
    return json.loads(json.dumps(content, default=str))  # the form that reading the marker returns


def check_same_training(folder: str, identity: dict) -> None:
    """Raise WorkshopError (exit code 4) if settings differ from the checkpoint's. The message names each of them."""
    saved = read_marker(folder)
    sharded = not {saved["strategy"], identity["strategy"]} <= UNSHARDED
    before = compared_values(saved, sharded)
    now = compared_values(identity, sharded)
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    differences = [f"{name} was {before.get(name)}, is {now.get(name)}" for name in names]
    if not differences and saved["data"] != identity["data"]:
        differences = ["the training questions or their tokens differ"]
    if differences:
        way_out = "give the same settings, or leave --resume_from_checkpoint out to start from the beginning"
        raise WorkshopError(folder, f"is of another training: {', '.join(differences)}", way_out, NO_CHECKPOINT)


def compared_values(identity: dict, sharded: bool) -> dict[str, Any]:
    """Return the values that must equal the checkpoint's, by the names that error messages use."""
    found = identity["settings"] | {f"config {key}": value for key, value in identity["config"].items()}
    if sharded:
        found |= {"strategy": identity["strategy"], "ranks": identity["world_size"]}
    return found


# 3. No code
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

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def check_for_code(checkpoint: str | Path) -> None:
    """Raise WorkshopError (exit code 4) if a file of the checkpoint is damaged or contains a class that is not allowed.

    Call this after `forbid_code_in_checkpoints`. It reads no tensors.
    """
    for path in sorted(Path(checkpoint).rglob("*")):
        if path.suffix not in TORCH_FILES or path.name == NEVER_LOADED:
            continue
        try:
            with safe_globals():  # allows numpy's classes, which the Trainer needs to load the random states
                foreign = get_unsafe_globals_in_checkpoint(path)
            what = f"contains {min(foreign)}, which is code, not data" if foreign else ""
        except Exception as error:  # a damaged pickle can raise any exception
            what = f"is damaged, or not a checkpoint file ({type(error).__name__})"
        if what:
            way_out = "resume from a checkpoint that your own run wrote"
            raise WorkshopError(path, what, way_out, NO_CHECKPOINT)
