"""Tests of checkpoints that a run must not resume from: damaged, of another training, or with code in them."""

import os
from pathlib import Path

import pytest
from transformers import GPTNeoXConfig

from workbench import Bench, same_training

KEPT = ("--save_total_limit", 2)
RESUME = "--resume_from_checkpoint"
SECOND = (RESUME, "output/7/checkpoint-4")
TEST_FAULTS_ONLY = pytest.mark.faults
ZERO2, PAIR = ("--deepspeed", "ds_configs/zero2.json"), {"ranks": 2, "BATCH_SIZE": 1}
DAMAGES = {
    "truncated file": lambda folder: os.truncate(folder / "optimizer.pt", 1000),
    "no marker": lambda folder: (folder / "complete.json").unlink(),
    "truncated shard": lambda folder: os.truncate(sorted(folder.glob("global_step4/*_optim_states.pt"))[1], 1000),
}


@pytest.mark.promise("reliability 8")
@pytest.mark.parametrize(
    ("damage", "flags", "how"), [("truncated file", (), {}), ("no marker", (), {}), ("truncated shard", ZERO2, PAIR)]
)
def test_a_damaged_checkpoint_is_skipped(bench: Bench, damage, flags, how):
    output = bench.trained(*flags, *KEPT, **how).output
    (output / "config.json").unlink()  # a run that is killed before it saves its model lacks this file
    DAMAGES[damage](output / "checkpoint-4")
    again = bench.run(*flags, *KEPT, RESUME, **how)
    assert again.record["resumed_from"] == "output/7/checkpoint-2", again
    assert same_training(again, bench.reference(*flags, *KEPT, **how))


INCOMPLETE = "...: no complete checkpoint in output/7/checkpoint-4 (incomplete: checkpoint-4); ..."
CHANGES = {  # a file of the checkpoint, two texts, mostly of the same length, and the error
    "size": ("optimizer.pt", b"PK", b"P", INCOMPLETE),
    "step": ("complete.json", b'"step": 4', b'"step": 3', "trainer_state.json: is not of step 3, ..."),
    "field": ("complete.json", b'"at_once"', b'"at_oncf"', "complete.json: is not a valid marker ...(at_once: ..."),
    "JSON": ("complete.json", b'"step": 4', b'"step": /', "complete.json: is not a valid marker ...Invalid JSON: ..."),
    "name": ("model.safetensors", b"h.0.mlp", b"h.7.mlp", "model.safetensors: contains ...h.7.mlp..., which ..."),
    "shape": ("model.safetensors", b"[2048,64]", b"[64,2048]", "model.safetensors: contains ...embeddings..."),
    "header": ("model.safetensors", b'"shape"', b'"shade"', "model.safetensors: is damaged, ...SafetensorError: ..."),
    "state": ("trainer_state.json", b'"epoch"', b'"epoxy"', "trainer_state.json: is damaged, ...'epoxy'..."),
}


@pytest.mark.promise("reliability 8")
@pytest.mark.parametrize(("name", "before", "after", "line"), CHANGES.values(), ids=CHANGES)
def test_a_changed_checkpoint_named_by_the_user_ends_the_run(bench: Bench, name, before, after, line):
    """The Trainer would skip a weight that the model does not have, and continue with a new one."""
    path = bench.trained(*KEPT).output / "checkpoint-4" / name
    assert before in path.read_bytes()
    path.write_bytes(path.read_bytes().replace(before, after, 1))
    bench.refuses(line if line == INCOMPLETE else f"output/7/checkpoint-4/{line}", *SECOND, code=4, JOB_ID=8)


def test_a_model_with_other_names_in_its_files_resumes_with_its_weights(bench: Bench):
    """In the files of GPT-NeoX, the head has the name that it had in older versions of transformers."""
    GPTNeoXConfig(vocab_size=2048, hidden_size=32, num_hidden_layers=1, num_attention_heads=2).save_pretrained(
        bench.folder / "neox"
    )
    own = {"MODEL_NAME": "./neox", "FROM_SCRATCH": "True", "TOKENIZER_NAME": "tiny-bloom"}
    whole = bench.run(*KEPT, **own)
    resumed = bench.run(*KEPT, RESUME, "output/7/checkpoint-2", JOB_ID=8, **own)
    assert same_training(resumed, whole)
    assert b'"embed_out.weight"' in (resumed.output / "model.safetensors").read_bytes(), "the original name"


def test_a_completed_training_has_no_step_left(bench: Bench):
    bench.trained(*KEPT)
    ended = bench.run(*KEPT, *SECOND, JOB_ID=8)
    assert "step 4 was the last one, nothing is left to train" in ended.out, ended


# Write a pickle that runs code when it is loaded, and list its size in the marker so that the checkpoint is complete
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


@pytest.mark.promise("Security: checkpoints are data")
@pytest.mark.parametrize(
    ("name", "flags"),
    [("optimizer.pt", ()), pytest.param("global_step4/mp_rank_00_model_states.pt", ZERO, marks=TEST_FAULTS_ONLY)],
)
def test_code_in_a_checkpoint_is_not_run(bench: Bench, name, flags):
    folder: Path = bench.trained(*flags, *KEPT).output / "checkpoint-4"
    bench.write("evil.py", EVIL)
    bench.run(folder, name, script="evil.py")
    ended = bench.run(*flags, *KEPT, *SECOND, code=4, JOB_ID=8)
    assert Path(name).name in ended.error, ended
    assert not (bench.folder / "canary").exists()
