"""A run resumes only from a checkpoint that every rank finished and that belongs to the same training."""

import json
import os
import re
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset

from distributed.strategy import FULL_SHARD, PLAIN, ZERO
from guard import preconditions
from guard.checkpoints import (
    CheckpointCallback,
    check_same_training,
    find_checkpoint,
    keep_global_batch,
    mark_complete,
    remove_stop_checkpoints,
    training_identity,
)
from guard.preconditions import check_room
from helpers import as_nobody, only_root
from settings.command_line import LATEST, parse_command_line
from settings.settings import Settings
from shared.paths import CHECKPOINT_MARKER

MARKED = {"job_id": "7", "world_size": 1, "strategy": "plain", "save_strategy": "epoch", "step": 20}
MARKED |= {"settings": {"global_batch": 16}, "config": {}, "data": "", "at_once": 4}


def checkpoint(folder: Path | str, step: int, complete: bool = True, age: int = 0, **saved_by: object) -> Path:
    """Create a checkpoint folder. age: its age in seconds. saved_by: entries of the marker that differ from MARKED."""
    path = Path(folder) / f"checkpoint-{step}"
    path.mkdir(parents=True)
    (path / "trainer_state.json").write_text("{}")
    for name in ("optimizer.pt", "rng_state.pth"):
        (path / name).write_bytes(b"0123456789")
    if complete:
        mark_complete(path, MARKED | {"step": step} | saved_by)
        time = (path / CHECKPOINT_MARKER).stat().st_mtime - age
        os.utime(path / CHECKPOINT_MARKER, (time, time))
    return path


def find(wanted: str | None, output_dir: str = "output/7") -> str | None:
    return find_checkpoint(wanted, output_dir, "7")


def list_names(folder: str) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


# The choice of the checkpoint


def test_the_newest_complete_checkpoint_is_taken():
    """The highest number is not always the newest, because a resumed run repeats lower steps.

    Incomplete checkpoints are never taken.
    """
    checkpoint("output/7", 100, age=50)
    newest = checkpoint("output/7", 20, age=10)
    checkpoint("output/7", 30, complete=False)
    (checkpoint("output/7", 40) / "optimizer.pt").write_bytes(b"01234")
    (checkpoint("output/7", 50) / "optimizer.pt").unlink()
    (checkpoint("output/7", 60) / CHECKPOINT_MARKER).write_text('{"files": ')
    (checkpoint("output/7", 80) / CHECKPOINT_MARKER).write_text("[" * 10_000)
    assert find(LATEST) == find("output/7") == str(newest)
    assert find(None) is None


@pytest.mark.promise("reliability 8")
def test_a_neighbours_checkpoint_is_only_for_a_run_without_checkpoints(refusal):
    neighbour = checkpoint("output/6", 99)
    assert find(LATEST) == str(neighbour)
    checkpoint("output/7", 20, complete=False)
    (checkpoint("output/7", 40) / "optimizer.pt").unlink()
    assert refusal(find, LATEST, code=4) == (
        "error: --resume_from_checkpoint: no complete checkpoint in output/7 (incomplete: checkpoint-20, "
        "checkpoint-40); leave the flag out to start from the beginning, or name the checkpoint of another run"
    )


def test_a_job_that_slurm_restarts_resumes_from_its_own_checkpoint(monkeypatch):
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    checkpoint("output/6", 99)
    checkpoint("output/7", 99, job_id="5")
    checkpoint("output/7", 5, complete=False)
    assert find(None) is None, "the checkpoints of other jobs do not count, so the job starts from the beginning"
    checkpoint("output/7", 10, age=20)
    newest = checkpoint("output/7", 20)
    checkpoint("output/7", 30, complete=False)
    assert find(None) == find("output/6") == str(newest), (
        "a restarted job prefers its own checkpoint to the requested one"
    )


@only_root
@pytest.mark.parametrize("closed", ["output/7", "output/7/checkpoint-20"])
def test_a_closed_folder_of_another_user_is_named(closed, refusal):
    """As another user, this test reads relative paths, because it may not enter the folders of pytest."""
    marker = checkpoint("output/7", 20) / CHECKPOINT_MARKER
    for path in (*marker.parents, marker):  # the tests may run with umask 077
        path.chmod(0o755)
    Path(closed).chmod(0o600)
    with as_nobody():
        lines = [refusal(find, wanted, code=3) for wanted in (LATEST, "output/7", "output/7/checkpoint-20")]
    for line in lines:
        assert line.startswith(f"error: {closed}") and ": may not be read by you; ask its owner to run chmod" in line


# Saving


def save(step: int, limit: int | None, best: str | None = None) -> None:
    """Call the callback as the Trainer does after it has written the files of a checkpoint."""
    callback = CheckpointCallback(SimpleNamespace(args=SimpleNamespace(save_total_limit=limit)), MARKED)
    state = SimpleNamespace(global_step=step, best_model_checkpoint=best)
    callback.on_save(SimpleNamespace(output_dir="output/7"), state, None)


@pytest.mark.parametrize(("limit", "best", "removed"), [(1, 10, {5}), (1, None, {5, 10}), (None, None, set())])
def test_saving_marks_the_checkpoint_and_removes_older_ones_except_the_best(limit, best, removed):
    checkpoint("output/7", 5, age=20)
    checkpoint("output/7", 10, age=30)
    checkpoint("output/7", 20, complete=False)
    save(20, limit, best and f"output/7/checkpoint-{best}")
    marker = json.loads(Path("output/7/checkpoint-20", CHECKPOINT_MARKER).read_text())
    assert (marker["step"], marker["world_size"], marker["files"]["optimizer.pt"]) == (20, 1, 10)
    assert list_names("output/7") == sorted(f"checkpoint-{step}" for step in {5, 10, 20} - removed)


def test_a_run_without_saving_removes_only_the_checkpoints_of_its_stops():
    checkpoint("output/7", 20, save_strategy="epoch")
    checkpoint("output/7", 30, save_strategy="no")
    checkpoint("output/8", 30, save_strategy="no")
    remove_stop_checkpoints("output/7")
    remove_stop_checkpoints("output/8")
    assert (list_names("output/7"), list_names("output/8")) == (["checkpoint-20"], [])


# The same training

TOKENS = {"input_ids": [[1, 2, 3], [4, 5]], "labels": [[-100, 2, 3], [4, 5]]}


def make_run(*argv: str, tokens: dict = TOKENS, ranks: int = 1, strategy: str = "plain") -> tuple[Settings, dict]:
    settings = parse_command_line("", ["--model_name", "tiny-bloom", "--labels", "sequence", *argv], environment={})
    return settings, training_identity("7", settings, strategy, ranks, Dataset.from_dict(tokens))


def save_marker(*argv: str, **run: object) -> str:
    return str(checkpoint("output/7", 20, **make_run(*argv, **run)[1]))


ALLOWED = [
    "--num_train_epochs 9 --logging_steps 1 --output_dir elsewhere --run_name other --no_em_f1 --max_steps 99",
    "--save_strategy steps --save_steps 7 --save_total_limit 3 --eval_strategy steps --eval_steps 7",
    "--gradient_accumulation_steps 8 --per_device_train_batch_size 2",
]


@pytest.mark.parametrize("words", ALLOWED)
def test_settings_that_do_not_define_the_training_may_change(words):
    check_same_training(save_marker(), make_run(*words.split())[1])


CHANGED = {
    "--learning_rate 1e-4": "learning_rate was 5e-05, is 0.0001",
    "--labels answer --max_length 256": "labels was sequence, is answer, max_length was 512, is 256",
    "--dataset my.json": "dataset was squad, is my.json",
    "--lora_rank 8": "lora_rank was 0, is 8",
    "--dataloader_drop_last": "dataloader_drop_last was False, is True",
    "--warmup_steps 10 --seed 3": "seed was 42, is 3, warmup_steps was 0, is 10.0",
    # With --labels all, padding counts in the loss, and the hash of the tokens does not contain it
    "--padding longest --optim sgd --max_grad_norm 9": "max_grad_norm was 1.0, is 9.0, optim was adamw_torch_fused, "
    "is sgd, padding was max_length, is longest",
    "--lr_scheduler_type cosine": "lr_scheduler_type was linear, is cosine",
}


@pytest.mark.promise("reliability 7")
@pytest.mark.parametrize("words", CHANGED)
def test_another_setting_ends_with_4_and_is_named(words, refusal):
    folder = save_marker()
    assert refusal(check_same_training, folder, make_run(*words.split())[1], code=4) == (
        f"error: {folder}: is of another training: {CHANGED[words]}; "
        "give the same settings, or leave --resume_from_checkpoint out to start from the beginning"
    )


def test_the_layout_of_fsdp2_may_change_but_not_its_files(refusal):
    layout = {"dp_shard_size": 2, "reshard_after_forward": False, "activation_checkpointing": True, "min_num_params": 9}
    first = make_run(strategy="FSDP2 SHARD_GRAD_OP")[1] | {"config": layout}
    path = checkpoint("output/7", 20, **first)
    bare = make_run("--activation_checkpointing", strategy="FSDP2 FULL_SHARD")[1]
    check_same_training(str(path), bare)
    for change, message in (
        ({"cpu_offload": True}, "config cpu_offload was False, is True"),
        (
            {"state_dict_type": "SHARDED_STATE_DICT"},
            "config state_dict_type was FULL_STATE_DICT, is SHARDED_STATE_DICT",
        ),
    ):
        assert message in refusal(check_same_training, str(path), bare | {"config": change}, code=4)


@pytest.mark.promise("reliability 7")
@pytest.mark.parametrize(
    ("saved", "resumed"),
    [
        ("plain", "FSDP2 FULL_SHARD"),
        ("FSDP2 FULL_SHARD", "DDP"),
        ("FSDP2 FULL_SHARD", "FSDP1 FULL_SHARD"),
        ("FSDP2 FULL_SHARD", "TP x FSDP2"),
        ("DeepSpeed ZeRO-0", "DDP"),
        ("DeepSpeed ZeRO-0", "DeepSpeed ZeRO-1"),
        ("DeepSpeed ZeRO-1", "DeepSpeed ZeRO-2"),
        ("FSDP2 FULL_SHARD", "DeepSpeed ZeRO-0"),
    ],
)
def test_no_checkpoint_is_resumed_by_another_family(saved, resumed, refusal):
    folder = save_marker(strategy=saved)
    assert "strategy was " in refusal(check_same_training, folder, make_run(strategy=resumed)[1], code=4)


def test_a_checkpoint_without_the_optimizer_is_refused(refusal):
    folder = checkpoint("output/7", 20, complete=False)
    (folder / "rng_state.pth").unlink()
    mark_complete(folder, make_run()[1] | {"step": 20})
    assert refusal(check_same_training, folder, make_run()[1], code=4) == (
        f"error: {folder}: was saved with --save_only_model, without the optimizer; resume from another checkpoint"
    )


def test_a_restarted_job_keeps_its_global_batch_on_other_ranks(monkeypatch):
    """The third start has all ranks again, and its checkpoint is of the second start."""
    monkeypatch.setenv("SLURM_RESTART_COUNT", "1")
    settings, first = make_run(ranks=2, strategy="DDP")
    checkpoint("output/7", 20, **first)
    fewer = keep_global_batch(settings, "output/7", "7", ranks=1)
    assert (fewer.trainer.gradient_accumulation_steps, fewer.requested_accumulation) == (8, 4)
    assert keep_global_batch(settings, "output/7", "7", ranks=2) == settings
    assert keep_global_batch(settings, "output/7", "7", ranks=3) == settings, "12 does not divide 32"
    assert keep_global_batch(settings, "output/7", "8", ranks=1) == settings, "the checkpoint of another job"
    monkeypatch.setenv("SLURM_RESTART_COUNT", "0")
    assert keep_global_batch(settings, "output/7", "7", ranks=1) == settings


def test_changed_questions_and_config_files_are_noticed_despite_equal_names(refusal):
    folder, first = save_marker(), make_run()[1]
    others = make_run(tokens=TOKENS | {"labels": [[1, 2, 4], [4, 5]]})[1]
    # A checkpoint of 2.0.0 has no hash of the tokens, but one of everything that they depended on
    older = str(checkpoint("output/8", 20, **{name: value for name, value in first.items() if name != "tokens"}))
    for path in (folder, older):
        assert "the training questions or their tokens differ" in refusal(check_same_training, path, others, code=4)
    check_same_training(older, others | {"data": first["data"]})
    changed = first | {"config": {"zero_optimization.stage": 2}}
    line = refusal(check_same_training, folder, changed, code=4)
    assert "config zero_optimization.stage was None, is 2" in line


# Disk space. tests/faults tests a folder that is not writable


def test_too_little_disk_space_is_found_before_the_training(monkeypatch, refusal):
    """The model has 1,000 parameters. Each of two checkpoints takes 12 bytes per parameter, and the model takes 4."""
    model = torch.nn.Linear(100, 10, bias=False)
    settings, one_epoch, unsaved = (
        make_run("--fp16", "False", *argv)[0]
        for argv in ((), ("--num_train_epochs", "1"), ("--save_strategy", "no"))
    )  # fmt: skip
    monkeypatch.setattr(preconditions.shutil, "disk_usage", lambda path: SimpleNamespace(free=1000 * (2 * 12 + 4)))
    check_room("output/7", settings, model, PLAIN, keep=1)
    line = refusal(check_room, "output/7", settings, model, FULL_SHARD, 1, code=3)
    what = "has 0.0 GiB free, but needs 2 x 0.0 GiB for checkpoints and 0.0 GiB for the model; .*"
    assert re.fullmatch(rf"error: \S+/work: {what}", line)
    check_room("output/7", one_epoch, model, FULL_SHARD, keep=1)
    check_room("output/7", unsaved, model, ZERO[2], keep=10)
    checkpoint("output/7", 10)
    check_room("output/7", settings, model, FULL_SHARD, keep=1)
    for optim, size in {"sgd": 4, "rmsprop": 8, "adafactor": 12}.items():  # an unknown state counts as AdamW's
        other = make_run("--fp16", "False", "--optim", optim)[0]
        assert preconditions.bytes_to_save(other, model, PLAIN)[0] == 1000 * size
