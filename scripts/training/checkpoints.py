"""Checkpoints that are known to be complete.

transformers resumes from the highest-numbered folder, even when the job was killed while writing it, and
starts with a fresh optimizer when that file is missing. Here every checkpoint that all ranks finished gets
the file `complete.json`, with the size of each of its files, and only such a checkpoint is resumed from.
"""

import json
import re
import shutil
from pathlib import Path

from transformers import TrainerCallback

from config import LATEST
from errors import NO_CHECKPOINT, WorkshopError
from json_files import write_json
from parallel.distributed import rank, wait_for_everyone

MARKER = "complete.json"
UNSHARDED = {"plain", "DDP"}  # each rank holds everything, so any number of ranks can go on


class CheckpointCallback(TrainerCallback):
    """Marks each saved checkpoint as complete, and only then removes the older ones."""

    def __init__(self, save_total_limit: int | None, strategy: str):
        self.save_total_limit = save_total_limit
        self.strategy = strategy

    def on_save(self, args, state, control, **kwargs):
        wait_for_everyone()  # every rank writes a part
        if rank() == 0:
            folder = Path(args.output_dir) / f"checkpoint-{state.global_step}"
            mark_complete(folder, args.world_size, self.strategy)
            self.remove_older(Path(args.output_dir), state.best_model_checkpoint)
        wait_for_everyone()

    def remove_older(self, output_dir: Path, best: str | None) -> None:
        newest_first = sorted(complete_ones([output_dir]), key=age)
        for folder in newest_first[self.save_total_limit :] if self.save_total_limit else []:
            if best is None or folder != Path(best):
                shutil.rmtree(folder)


def mark_complete(folder: Path, world_size: int, strategy: str) -> None:
    (folder / MARKER).unlink(missing_ok=True)  # of a run that was resumed before this step and writes it again
    sizes = {str(f.relative_to(folder)): f.stat().st_size for f in folder.rglob("*") if f.is_file()}
    write_json(folder / MARKER, {"world_size": world_size, "strategy": strategy, "files": sizes})


def is_complete(folder: Path) -> bool:
    try:
        files = json.loads((folder / MARKER).read_text())["files"]
        return all((folder / name).stat().st_size == size for name, size in files.items())
    except (OSError, ValueError, KeyError):
        return False


def find_checkpoint(requested: str | None, output_dir: str, world_size: int, strategy: str) -> str | None:
    """The complete checkpoint to go on from: `requested` itself, the latest in that folder, or for `latest` the
    latest of this run or, when it has none, of the other runs beside it.

    Raises WorkshopError (exit code 4) when there is none, or when other ranks or another way of sharding saved it.
    """
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
        return check_fits(Path(requested), world_size, strategy)
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
    return check_fits(found, world_size, strategy)


def latest_complete(places: list[Path]) -> Path | None:
    return min(complete_ones(places), key=age, default=None)


def complete_ones(places: list[Path]) -> list[Path]:
    return [folder for place in places for folder in place.glob("checkpoint-*") if is_complete(folder)]


def age(folder: Path) -> float:
    """Sorts newest first. Not the step number: a resumed run may go through lower ones again."""
    return -(folder / MARKER).stat().st_mtime


def check_fits(folder: Path, world_size: int, strategy: str) -> str:
    saved = json.loads((folder / MARKER).read_text())
    if {saved["strategy"], strategy} <= UNSHARDED:
        return str(folder)
    if (saved["strategy"], saved["world_size"]) != (strategy, world_size):
        raise WorkshopError(
            folder,
            f"saved by {saved['world_size']} ranks with {saved['strategy']}, this run has {world_size} with {strategy}",
            "resume with the same number of ranks and the same config",
            NO_CHECKPOINT,
        )
    return str(folder)
