"""Resuming: only from a checkpoint that every rank finished, and that fits the run."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from config import LATEST, Options, parse_command_line
from training import checkpoints
from training.callbacks import TrainSpeedCallback
from training.checkpoints import (
    MARKER,
    CheckpointCallback,
    Progress,
    check_room,
    check_same_training,
    find_checkpoint,
    is_complete,
    mark_complete,
    marker_of,
    remove_checkpoints_of_stops,
)

MARKED = {"job_id": "7", "world_size": 1, "strategy": "plain", "save_strategy": "epoch"}


def checkpoint(folder: Path | str, step: int, complete: bool = True, age: int = 0, **saved_by: object) -> Path:
    """A checkpoint folder; `age` in seconds, `saved_by`: world_size and strategy."""
    path = Path(folder) / f"checkpoint-{step}"
    (path / "global_step").mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    (path / "global_step" / "optimizer.pt").write_bytes(b"0123456789")
    if complete:
        mark_complete(path, MARKED | {"step": step} | saved_by)
        time = (path / MARKER).stat().st_mtime - age
        os.utime(path / MARKER, (time, time))
    return path


def find(wanted: str | None, output_dir: str = "output/7") -> str | None:
    return find_checkpoint(wanted, output_dir, "7")


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
    older.rename("kept")
    assert find("kept") == "kept"


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


def save(callback: CheckpointCallback, step: int, best: str | None = None) -> None:
    state = SimpleNamespace(global_step=step, best_model_checkpoint=best)
    callback.on_save(SimpleNamespace(output_dir="output/7"), state, None)


def callback(save_total_limit: int | None) -> CheckpointCallback:
    trainer = SimpleNamespace(_tr_loss=0.5, _total_loss_scalar=20.0, _globalstep_last_logged=18, earlier_seconds=7.0)
    trainer.tokens = torch.tensor([100, 20, 90, 5000])
    trainer.args = SimpleNamespace(save_total_limit=save_total_limit)
    watching = CheckpointCallback(trainer, MARKED, TrainSpeedCallback(trainer, None, 1.0), None)
    watching.on_train_begin(None, None, None)
    return watching


def test_saving_marks_the_new_checkpoint_and_then_removes_the_older_ones():
    checkpoint("output/7", 10, age=20)
    killed = checkpoint("output/7", 15, complete=False)
    new = checkpoint("output/7", 20, complete=False)
    save(callback(1), 20)
    assert is_complete(new)
    marker = json.loads((new / MARKER).read_text())
    assert (marker["world_size"], marker["strategy"]) == (1, "plain")
    assert marker["files"]["global_step/optimizer.pt"] == 10
    progress = marker["progress"]
    assert progress.pop("seconds") >= 7
    assert progress == {
        "logged_loss": 20.0,
        "last_logged_step": 18,
        "unlogged_losses": [0.5],
        "steady_steps": 0,
        "steady_seconds": 0.0,
        "tokens": [[100, 20, 90, 5000], [0, 0, 0, 0]],
    }
    assert not (killed.parent / "checkpoint-10").exists()


def test_best_checkpoint_is_kept():
    best = checkpoint("output/7", 10, age=20)
    checkpoint("output/7", 15, age=10)
    checkpoint("output/7", 20, complete=False)
    save(callback(1), 20, str(best))
    assert sorted(p.name for p in Path("output/7").iterdir()) == ["checkpoint-10", "checkpoint-20"]


def test_without_a_limit_all_are_kept():
    checkpoint("output/7", 10)
    checkpoint("output/7", 20, complete=False)
    save(callback(None), 20)
    assert len(list(Path("output/7").iterdir())) == 2


def test_a_job_that_slurm_starts_again_goes_on_from_its_own_checkpoint(monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    assert find(None) is None, "none yet: it begins anew"
    checkpoint("output/6", 99)
    checkpoint("output/7", 99, job_id="5")
    assert find(None) is None, "of other jobs, one in the same folder"
    checkpoint("output/7", 10, age=20)
    newest = checkpoint("output/7", 20)
    checkpoint("output/7", 30, complete=False)
    assert find(None) == find("output/6") == str(newest), "its own, whatever it began with"


def test_progress_of_another_number_of_ranks_is_their_mean(monkeypatch):
    progress = Progress(1.0, 20.0, 18, [1.0, 3.0], 4, 2.0, [])
    assert progress.unlogged_loss == 2
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")
    assert progress.unlogged_loss == 3


TOKENS = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, 2, 3], [4, 5]]}


def run_of(*argv: str, tokens: dict = TOKENS, ranks: int = 1, strategy: str = "plain") -> tuple[Options, dict]:
    options = parse_command_line("", ["--model_name", "tiny-bloom", *argv], environment={})
    return options, marker_of("7", options, strategy, ranks, Dataset.from_dict(tokens))


def saved(*argv: str, **of_run: object) -> Path:
    path = checkpoint("output/7", 20, complete=False)
    mark_complete(path, run_of(*argv, **of_run)[1])
    return path


ALLOWED = [
    ("--num_train_epochs", "9"),
    ("--max_steps", "99"),
    ("--logging_steps", "1", "--logging_strategy", "steps"),
    ("--save_strategy", "steps", "--save_steps", "7", "--save_total_limit", "3"),
    ("--eval_strategy", "steps", "--eval_steps", "7"),
    ("--output_dir", "elsewhere", "--run_name", "other", "--no_em_f1", "--em_f1_batch_size", "2"),
    ("--gradient_accumulation_steps", "8", "--per_device_train_batch_size", "2"),
]


@pytest.mark.parametrize("argv", ALLOWED, ids=lambda argv: argv[0])
def test_what_does_not_define_the_training_may_change(argv):
    folder = saved()
    check_same_training(str(folder), run_of(*argv)[1])


CHANGED = {
    "learning_rate was 5e-05, is 0.0001": ("--learning_rate", "1e-4"),
    "seed was 42, is 7": ("--seed", "7"),
    "labels was sequence, is answer": ("--labels", "answer"),
    "train_size was 500, is 600": ("--train_size", "600"),
    "eval_size was 100, is 50": ("--eval_size", "50"),
    "dataset was squad, is my.json": ("--dataset", "my.json"),
    "warmup_steps was 0, is 10.0": ("--warmup_steps", "10"),
    "global_batch was 16, is 32": ("--gradient_accumulation_steps", "8"),
    "max_length was 512, is 256": ("--max_length", "256"),
}


@pytest.mark.parametrize(("what", "argv"), CHANGED.items(), ids=lambda value: str(value))
def test_another_setting_ends_with_4_and_is_named(what, argv, refusal):
    folder = saved()
    line = refusal(check_same_training, str(folder), run_of(*argv)[1], code=4)
    assert line == (
        f"error: {folder}: is of another training: {what}; "
        "give the same settings, or leave --resume_from_checkpoint out to start anew"
    )


TWO_RANKS = ("--per_device_train_batch_size", "2")


@pytest.mark.parametrize(
    ("ranks", "strategy", "what"),
    [
        (1, "DeepSpeed ZeRO-2", "ranks was 2, is 1"),
        (2, "DeepSpeed ZeRO-3", "strategy was DeepSpeed ZeRO-2, is DeepSpeed ZeRO-3"),
        (1, "plain", "ranks was 2, is 1, strategy was DeepSpeed ZeRO-2, is plain"),
    ],
)
def test_shares_of_other_ranks_or_another_strategy_end_with_4(ranks, strategy, what, refusal):
    folder = saved(*TWO_RANKS, ranks=2, strategy="DeepSpeed ZeRO-2")
    check_same_training(str(folder), run_of(*TWO_RANKS, ranks=2, strategy="DeepSpeed ZeRO-2")[1])
    marker = run_of(*(TWO_RANKS if ranks == 2 else ()), ranks=ranks, strategy=strategy)[1]
    assert f"is of another training: {what}; " in refusal(check_same_training, str(folder), marker, code=4)


def test_what_each_rank_holds_whole_fits_any_number_of_ranks():
    folder = saved(*TWO_RANKS, ranks=2, strategy="DDP")
    check_same_training(str(folder), run_of()[1])


def test_a_flag_that_is_no_longer_given_is_named(refusal):
    line = refusal(check_same_training, str(saved("--warmup_steps", "10", "--seed", "3")), run_of()[1], code=4)
    assert "training: seed was 3, is 42, warmup_steps was 10.0, is 0;" in line


def test_other_questions_behind_the_same_name_are_noticed(refusal):
    folder = saved()
    tokens = TOKENS | {"labels": [[1, 2, 4], [4, 5]]}
    line = refusal(check_same_training, str(folder), run_of(tokens=tokens)[1], code=4)
    assert "the training questions or their tokens are others" in line


def test_a_changed_config_file_is_named_by_its_key(refusal):
    folder = saved()
    marker = run_of()[1] | {"config": {"zero_optimization.stage": 2}}
    line = refusal(check_same_training, str(folder), marker, code=4)
    assert "config zero_optimization.stage was None, is 2" in line


def test_too_little_room_is_found_before_the_training(monkeypatch, refusal):
    model = torch.nn.Linear(100, 10, bias=False)
    options = run_of("--fp16", "False")[0]
    monkeypatch.setattr(checkpoints.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 * (2 * 12 + 4)))
    check_room("output/7", options, model, "plain", keep=1)
    line = refusal(check_room, "output/7", options, model, "FSDP2 FULL_SHARD", 1, code=3)
    what = r"0.0 GiB free, 2 checkpoint\(s\) of 0.0 GiB will be there at once, and a model of 0.0; .*"
    assert re.fullmatch(rf"error: \S+/work: {what}", line)
    check_room("output/7", run_of("--save_strategy", "no")[0], model, "DeepSpeed ZeRO-2", keep=10)
    check_room("output/7", run_of("--optim", "sgd")[0], model, "FSDP2 FULL_SHARD", keep=1)
    check_room("output/7", run_of("--num_train_epochs", "1")[0], model, "FSDP2 FULL_SHARD", keep=1)
    checkpoint("output/7", 10)
    check_room("output/7", options, model, "FSDP2 FULL_SHARD", keep=1)


def test_a_folder_that_cannot_be_written_is_found_before_the_training(monkeypatch, refusal):
    Path("mine").write_text("")
    line = refusal(check_room, "mine/new", run_of()[0], None, "plain", 1, code=3)
    assert line.endswith("/mine: cannot be written; give another --output_dir")
    monkeypatch.setattr(checkpoints.os, "access", lambda path, mode: False)
    line = refusal(check_room, "output/7", run_of()[0], None, "plain", 1, code=3)
    assert line.endswith("/work: cannot be written; give another --output_dir")


def test_a_run_that_saves_nothing_removes_what_its_stops_saved_and_no_others():
    checkpoint("output/7", 10)
    checkpoint("output/7", 20, save_strategy="epoch")
    checkpoint("output/7", 30, save_strategy="no")
    remove_checkpoints_of_stops("output/7")
    assert sorted(path.name for path in Path("output/7").iterdir()) == ["checkpoint-10", "checkpoint-20"]
    checkpoint("output/8", 30, save_strategy="no")
    remove_checkpoints_of_stops("output/8")
    assert not Path("output/8").exists()
