"""What a run goes on from: checkpoints that are damaged, of another training, or hold code."""

import json
import os
from pathlib import Path

import pytest

from bench import Bench, same_training

KEPT = ("--save_total_limit", 2)
RESUME = "--resume_from_checkpoint"
SECOND = (RESUME, "output/7/checkpoint-4")
WIDER = pytest.mark.faults
DAMAGES = {
    "a file cut off": lambda folder: os.truncate(folder / "optimizer.pt", 1000),
    "not marked": lambda folder: (folder / "complete.json").unlink(),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_damaged_checkpoint_is_passed_over(bench: Bench, damage):
    output = bench.trained(*KEPT).output
    (output / "config.json").unlink()  # as if it had been killed before it saved its model
    DAMAGES[damage](output / "checkpoint-4")
    again = bench.run(*KEPT, RESUME)
    assert again.record["resumed_from"] == "output/7/checkpoint-2", again
    assert same_training(again, bench.reference(*KEPT))


def test_a_damaged_checkpoint_that_is_named_ends_the_run(bench: Bench):
    output = bench.trained(*KEPT).output
    DAMAGES["a file cut off"](output / "checkpoint-4")
    bench.refuses("output/7/checkpoint-4: is not a complete checkpoint; ...", *SECOND, code=4, JOB_ID=8)


def test_a_checkpoint_in_parts_wants_as_many_ranks(bench: Bench):
    path = bench.trained(*KEPT).output / "checkpoint-4/complete.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"strategy": "DeepSpeed ZeRO-2", "world_size": 2}))
    told = "is of another training: ranks was 2, is 1, strategy was DeepSpeed ZeRO-2, is plain; ..."
    bench.refuses(f"output/7/checkpoint-4: {told}", *SECOND, code=4, JOB_ID=8)


def test_a_checkpoint_of_which_each_rank_holds_all_fits_fewer_ranks_and_more_epochs(bench: Bench):
    bench.trained(*KEPT, ranks=2, BATCH_SIZE=1)
    ended = bench.run(*KEPT, *SECOND, JOB_ID=8, NUM_EPOCHS=3)
    assert ended.record["status"] == "completed"
    assert [entry["step"] for entry in ended.record["eval"]] == [2, 4, 6]


def test_nothing_is_left_to_train(bench: Bench):
    bench.trained(*KEPT)
    ended = bench.run(*KEPT, *SECOND, JOB_ID=8)
    assert "step 4 was the last one, nothing is left to train" in ended.out, ended


def test_another_training_does_not_go_on_from_it(bench: Bench):
    """More settings: tests/unit/test_checkpoints.py."""
    bench.trained(*KEPT)
    line = "output/7/checkpoint-4: is of another training: ...learning_rate was ..., is ...; ..."
    bench.refuses(line, *KEPT, *SECOND, code=4, JOB_ID=8, LEARNING_RATE="1e-3")


# Writes a pickle that runs code, and a marker that says the file is whole
EVIL = """
import json, os, sys
from pathlib import Path
sys.path.insert(0, "scripts")
import torch
class Canary:
    def __reduce__(self):
        return os.mkdir, ("canary",)
folder, name = Path(sys.argv[1]), sys.argv[2]
torch.save(Canary(), folder / name)
marker = json.loads((folder / "complete.json").read_text())
marker["files"][name] = (folder / name).stat().st_size
(folder / "complete.json").write_text(json.dumps(marker))
"""
ZERO = ("--deepspeed", "ds_configs/zero1.json")


@pytest.mark.parametrize(
    ("name", "flags"),
    [("optimizer.pt", ()), pytest.param("global_step4/mp_rank_00_model_states.pt", ZERO, marks=WIDER)],
)
def test_code_in_a_checkpoint_is_not_run(bench: Bench, name, flags):
    folder: Path = bench.trained(*flags, *KEPT).output / "checkpoint-4"
    bench.write("evil.py", EVIL)
    bench.run(folder, name, script="evil.py")
    ended = bench.run(*flags, *KEPT, *SECOND, code=4, JOB_ID=8)
    assert Path(name).name in ended.error, ended
    assert not (bench.folder / "canary").exists()
