"""Find the checkpoint that a run resumes from: a complete one, of the same training, without code in it.

transformers resumes from the highest-numbered folder, even when the job was killed while writing it, and
starts with a fresh optimizer when that file is missing. Here every checkpoint that all ranks finished gets
the file `complete.json` (save_checkpoints.py), and only such a checkpoint is resumed from:

    job_id, world_size, strategy    who saved it
    step                    optimizer steps done
    settings, config, data  of the training: flags, DeepSpeed's or FSDP's config, the name of its tokens in the cache
    progress                what a resumed run counts on from, see Progress
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
# Settings that a resumed run may have otherwise: they decide when something is done, or where it goes
MAY_CHANGE = re.compile(
    r"num_train_epochs|max_steps|(logging|log|save|eval)_(?!size|dataset).*|output_dir|run_name|report_to|em_f1.*|profile"
    r"|resume_from_checkpoint|ddp_timeout|ddp_find_unused_parameters|disable_tqdm|dataloader_.*|per_device_(train|eval)_batch_size"
    r"|gradient_accumulation_steps|deepspeed|fsdp|fsdp_config|local_rank|use_cpu"
)
TORCH_FILES = {".pt", ".pth", ".bin"}
NEVER_LOADED = "training_args.bin"  # the Trainer writes it for people, and holds classes of many modules


# 1. Complete checkpoints


def checkpoint_folder(output_dir: str | Path | None, step: int) -> Path:
    return Path(output_dir or "output") / f"checkpoint-{step}"


def read_marker(folder: str | Path) -> dict:
    return json.loads((Path(folder) / MARKER).read_text(encoding="utf-8"))


def is_complete(folder: Path) -> bool:
    """Return whether the folder has a marker, and each file has the size that the marker gives."""
    try:
        files = read_marker(folder)["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError, TypeError):
        return False


def complete_ones(places: list[Path]) -> list[Path]:
    return [folder for place in places for folder in place.glob("checkpoint-*") if is_complete(folder)]


def newest_first(folder: Path) -> float:
    """Sort key: the newest checkpoint first. The step would not do, as a resumed run can repeat lower steps."""
    return -(folder / MARKER).stat().st_mtime


def find_checkpoint(requested: str | None, output_dir: str, job_id: str) -> str | None:
    """Return the checkpoint to resume from.

    requested: a checkpoint, a folder (its newest checkpoint is taken), or `latest`, which looks in this run first and
    then in the other runs next to it.

    A job that Slurm has started again resumes from its own latest checkpoint. When it has none, it begins as it did the
    first time. Raises WorkshopError (exit code 4) when there is none.
    """
    if os.environ.get("SLURM_RESTART_COUNT", "0") not in ("", "0"):
        own = [path for path in complete_ones([Path(output_dir)]) if read_marker(path)["job_id"] == job_id]
        if own:
            return str(min(own, key=newest_first))
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
    return str(min(found, key=newest_first))


# 2. The same training


def identity_of(job_id: str, settings: Settings, strategy: str, ranks: int, train_dataset: Dataset) -> dict:
    """Return the values that identify this training. Each checkpoint holds them, and a later run compares its own."""
    trainer = settings.trainer
    global_batch = trainer.per_device_train_batch_size * trainer.gradient_accumulation_steps * ranks
    defining = {flag: strip_repository(v) for flag, v in settings.flat().items() if not MAY_CHANGE.fullmatch(flag)}
    content = {
        "job_id": job_id,
        "world_size": ranks,
        "strategy": strategy,
        "save_strategy": trainer.save_strategy,
        "settings": defining | {"global_batch": global_batch},
        "config": flatten_keys(settings.deepspeed_config or settings.fsdp_config or {}),
        "data": train_dataset._fingerprint,
    }
    return json.loads(json.dumps(content, default=str))  # the form in which a later run reads it


def check_same_training(folder: str, identity: dict) -> None:
    """Raises WorkshopError (exit code 4) naming each setting in which this run differs from the checkpoint's."""
    saved = read_marker(folder)
    sharded = not {saved["strategy"], identity["strategy"]} <= UNSHARDED
    before = compared_values(saved, sharded)
    now = compared_values(identity, sharded)
    names = [name for name in sorted({*before, *now}) if before.get(name) != now.get(name)]
    differences = [f"{name} was {before.get(name)}, is {now.get(name)}" for name in names]
    if not differences and saved["data"] != identity["data"]:
        differences = ["the training questions or their tokens are others"]
    if differences:
        way_out = "give the same settings, or leave --resume_from_checkpoint out to start anew"
        raise WorkshopError(folder, f"is of another training: {', '.join(differences)}", way_out, NO_CHECKPOINT)


def compared_values(identity: dict, sharded: bool) -> dict[str, Any]:
    """Return the values that must equal the checkpoint's, by the names that error messages use."""
    found = identity["settings"] | {f"config {key}": value for key, value in identity["config"].items()}
    if sharded:
        found |= {"strategy": identity["strategy"], "ranks": identity["world_size"]}
    return found


# 3. No code
#
# torch.save writes a pickle, and a pickle may call any function there is. The Trainer loads its own files by PyTorch's
# `weights_only`, which accepts tensors, plain values and a list of classes. DeepSpeed does not use it, so
# forbid_code_in_checkpoints forces it. (The `.metadata` of a sharded FSDP checkpoint is a pickle that PyTorch reads
# itself: see SECURITY.md.)


def forbid_code_in_checkpoints(with_deepspeed: bool) -> None:
    """From here on this process loads tensors, plain values and the classes that a checkpoint holds, nothing else.

    The environment variable overrides `weights_only=False` in any call of torch.load.
    """
    os.environ.pop("TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD", None)  # PyTorch refuses to load anything under both
    os.environ["TORCH_FORCE_WEIGHTS_ONLY_LOAD"] = "1"
    if with_deepspeed:
        from deepspeed.runtime.fp16.loss_scaler import DynamicLossScaler, LossScaler
        from deepspeed.runtime.zero.config import ZeroStageEnum
        from deepspeed.utils.tensor_fragment import fragment_address

        add_safe_globals([DynamicLossScaler, LossScaler, ZeroStageEnum, fragment_address])


def refuse_code_in(checkpoint: str | Path) -> None:
    """Raises WorkshopError (exit code 4) for a file of a checkpoint that is damaged or holds a class that is refused.

    To be called after `forbid_code_in_checkpoints`. It reads no tensor.
    """
    for path in sorted(Path(checkpoint).rglob("*")):
        if path.suffix not in TORCH_FILES or path.name == NEVER_LOADED:
            continue
        try:
            with safe_globals():  # numpy's, with which the Trainer loads the random states
                foreign = get_unsafe_globals_in_checkpoint(path)
            what = f"holds {min(foreign)}, which is code and no data" if foreign else ""
        except Exception as error:  # a damaged pickle raises anything
            what = f"is damaged, or no file of a checkpoint ({type(error).__name__})"
        if what:
            way_out = "resume from a checkpoint that your own run has written"
            raise WorkshopError(path, what, way_out, NO_CHECKPOINT)
