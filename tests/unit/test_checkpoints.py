"""Resuming: only from a checkpoint that every rank finished, and that fits the run."""

import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest

from config import LATEST
from training.checkpoints import MARKER, CheckpointCallback, find_checkpoint, is_complete, mark_complete


def checkpoint(folder: Path | str, step: int, complete: bool = True, age: int = 0, **saved_by: object) -> Path:
    """A checkpoint folder; `age` in seconds, `saved_by`: world_size and strategy."""
    path = Path(folder) / f"checkpoint-{step}"
    (path / "global_step").mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "global_step" / "optimizer.pt").write_bytes(b"0123456789")
    if complete:
        mark_complete(path, **{"world_size": 1, "strategy": "plain", **saved_by})
        time = (path / MARKER).stat().st_mtime - age
        os.utime(path / MARKER, (time, time))
    return path


def find(wanted: str | None, output_dir: str = "output/7", world_size: int = 1, strategy: str = "plain") -> str | None:
    return find_checkpoint(wanted, output_dir, world_size, strategy)


def test_without_the_flag_nothing_is_resumed():
    checkpoint("output/7", 10)
    assert find(None) is None


def test_latest_complete_checkpoint_is_taken_and_never_an_incomplete_one():
    checkpoint("output/7", 10, age=20)
    newest = checkpoint("output/7", 20)
    checkpoint("output/7", 30, complete=False)
    assert find(LATEST) == find("output/7") == str(newest)


def test_newest_counts_and_not_the_highest_number():
    checkpoint("output/7", 100, age=50)
    newest = checkpoint("output/7", 20)
    assert find(LATEST) == str(newest)


@pytest.mark.parametrize("damage", ["truncated", "missing", "marker"])
def test_truncated_checkpoint_is_passed_over(damage):
    older = checkpoint("output/7", 10, age=20)
    newer = checkpoint("output/7", 20)
    if damage == "truncated":
        (newer / "global_step" / "optimizer.pt").write_bytes(b"01234")
    elif damage == "missing":
        (newer / "global_step" / "optimizer.pt").unlink()
    else:
        (newer / MARKER).write_text('{"files": ')
    assert not is_complete(newer)
    assert find(LATEST) == str(older)


def test_new_job_goes_on_from_the_latest_of_its_neighbours():
    checkpoint("output/5", 10, age=20)
    latest = checkpoint("output/6", 10)
    checkpoint("output/8", 99, complete=False)
    assert find(LATEST) == str(latest)
    own = checkpoint("output/7", 5, age=50)
    assert find(LATEST) == str(own)


def test_checkpoint_can_be_named(refusal):
    checkpoint("output/7", 20)
    older = checkpoint("output/7", 10, age=50)
    assert find("output/7/checkpoint-10") == str(older)
    assert find("output/7/checkpoint-10/") == str(older)


@pytest.mark.parametrize("name", ["incomplete", "absent"])
def test_named_checkpoint_that_is_not_complete_ends_with_4(name, refusal):
    checkpoint("output/7", 10)
    if name == "incomplete":
        checkpoint("output/7", 20, complete=False)
    assert refusal(find, "output/7/checkpoint-20", code=4) == (
        f"error: output/7/checkpoint-20: is no complete checkpoint; "
        f"choose a folder with a {MARKER} whose files are all there"
    )


@pytest.mark.parametrize("wanted", [LATEST, "output/7", "nowhere"])
def test_no_complete_checkpoint_ends_with_4(wanted, refusal):
    checkpoint("output/7", 20, complete=False)
    where = "nowhere" if wanted == "nowhere" else "output/7"
    assert refusal(find, wanted, code=4) == (
        f"error: --resume_from_checkpoint: no complete checkpoint in {where}; leave the flag out to start anew"
    )


@pytest.mark.parametrize(("ranks", "strategy"), [(4, "DeepSpeed ZeRO-2"), (2, "DeepSpeed ZeRO-3"), (1, "plain")])
def test_sharded_checkpoint_of_other_ranks_or_another_strategy_ends_with_4(ranks, strategy, refusal):
    path = checkpoint("output/7", 20, world_size=2, strategy="DeepSpeed ZeRO-2")
    assert find(LATEST, world_size=2, strategy="DeepSpeed ZeRO-2") == str(path)
    what = f"saved by 2 ranks with DeepSpeed ZeRO-2, this run has {ranks} with {strategy}"
    line = refusal(lambda: find(LATEST, world_size=ranks, strategy=strategy), code=4)
    assert line == f"error: {path}: {what}; resume with the same number of ranks and the same config"


def test_unsharded_checkpoint_fits_any_number_of_ranks():
    path = checkpoint("output/7", 20, world_size=2, strategy="DDP")
    assert find(LATEST, world_size=4, strategy="DDP") == str(path)
    assert find(LATEST, world_size=1, strategy="plain") == str(path)


def save(callback: CheckpointCallback, step: int, best: str | None = None) -> None:
    state = SimpleNamespace(global_step=step, best_model_checkpoint=best)
    callback.on_save(SimpleNamespace(output_dir="output/7", world_size=1), state, None)


def test_saving_marks_the_new_checkpoint_and_then_removes_the_older_ones():
    checkpoint("output/7", 10, age=20)
    killed = checkpoint("output/7", 15, complete=False)
    new = checkpoint("output/7", 20, complete=False)
    save(CheckpointCallback(1, "plain"), 20)
    assert is_complete(new)
    marker = json.loads((new / MARKER).read_text())
    assert (marker["world_size"], marker["strategy"]) == (1, "plain")
    assert marker["files"]["global_step/optimizer.pt"] == 10
    assert not (killed.parent / "checkpoint-10").exists()


def test_best_checkpoint_is_kept():
    best = checkpoint("output/7", 10, age=20)
    checkpoint("output/7", 15, age=10)
    checkpoint("output/7", 20, complete=False)
    save(CheckpointCallback(1, "plain"), 20, str(best))
    assert sorted(p.name for p in Path("output/7").iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_without_a_limit_all_are_kept():
    checkpoint("output/7", 10)
    checkpoint("output/7", 20, complete=False)
    save(CheckpointCallback(None, "plain"), 20)
    assert len(list(Path("output/7").iterdir())) == 2
