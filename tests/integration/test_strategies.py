"""Plain Trainer, DDP and every DeepSpeed config train the same model, on one process and on two."""

import json
import re
from types import SimpleNamespace

import pytest
import torch
from safetensors import safe_open
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import REPOSITORY, TINY, Finished, patched, run
from runs import CONFIGS, OTHER_BATCHES, STRATEGIES, uses
from training.checkpoints import bytes_to_save
from training.safe_load import load_weights_only, refuse_foreign_code

TOLERANCE = 1e-4  # what the order of fp32 additions may change; a lost gradient changes far more


@uses(*STRATEGIES)
def test_every_epoch_has_the_eval_loss_of_the_plain_trainer(run: Finished, table):
    expected = table("plain").losses
    assert len(expected) == 2
    assert expected[0] - expected[1] > 0.05, "the loss hardly moves, so that equal losses prove nothing"
    assert run.losses == pytest.approx(expected, abs=TOLERANCE, rel=0), run
    # the steps after the last log too: 16 steps, logged every 5th
    train_loss = table("plain").record["train"]["loss_mean"]
    assert run.record["train"]["loss_mean"] == pytest.approx(train_loss, abs=10 * TOLERANCE)


@uses(*OTHER_BATCHES)
def test_the_evaluation_does_not_depend_on_how_the_ranks_divide_the_labels(run: Finished, table):
    whole = table("answer_max_length" if run.job_id.startswith("answer") else "plain")
    assert run.losses == pytest.approx(whole.losses, abs=TOLERANCE, rel=0), run


@uses("plain", "ddp-2", "zero0-2", "zero2-2", "zero3-2", "full_shard-2", "bf16_plain", "bf16_zero2")
def test_a_checkpoint_is_as_large_as_was_expected(run: Finished):
    """Of the files that hold tensors: in a real model the others are nothing."""
    folder = next(run.output.glob("checkpoint-*"))
    files = [path for kind in ("*.pt", "*.bin", "*.safetensors") for path in folder.rglob(kind)]
    values = {"fp16": False, "bf16": run.effective("precision") == "bf16", "optim": "adamw_torch"}
    skeleton = AutoModelForCausalLM.from_pretrained(run.output)
    checkpoint, model = bytes_to_save(SimpleNamespace(values=values), skeleton, run.effective("strategy"))
    assert sum(path.stat().st_size for path in files) == pytest.approx(checkpoint, rel=0.03)
    assert (run.output / "model.safetensors").stat().st_size == pytest.approx(model, rel=0.03)


@uses(*(name for name in STRATEGIES if "zero" in name))
def test_deepspeed_runs_what_its_config_says(run: Finished):
    config, processes = run.job_id.rsplit("-", 1)
    zero = json.loads((REPOSITORY / "ds_configs" / f"{config}.json").read_text())["zero_optimization"]
    assert run.effective("strategy") == f"DeepSpeed ZeRO-{zero['stage']}"
    assert run.effective("world size") == int(processes) == run.record["world_size"]
    for part, key in (("optimizer", "offload_optimizer"), ("parameter", "offload_param")):
        device = zero.get(key, {}).get("device", "none")
        assert run.effective(f"{part} offload") == device
        if device != "none":
            pinned = run.record["knobs"][f"{part} pinned memory"]
            assert pinned == {"requested": zero[key]["pin_memory"], "effective": "n/a on CPU"}
    assert banner(run) == {
        "ZeRO Stage": str(zero["stage"]),
        "Parameter offloading": str("offload_param" in zero),
        "Optimizer offloading": str("offload_optimizer" in zero),
        "Global rank": "0",
        "World size": processes,
        "Device": "cpu",
    }


def banner(run: Finished) -> dict[str, str]:
    """The lines between the first and the last ruler of DeepSpeed's banner, which must stand in the log once."""
    lines = run.log.splitlines()
    titles = [i for i, line in enumerate(lines) if "Initialization Complete" in line]
    assert len(titles) == 1, run
    block = lines[titles[0] + 2 : titles[0] + 8]
    return dict(line.strip().split(": ") for line in block)


@uses("plain", "ddp-1", "ddp-2", "zero2-2")
def test_audit_shows_batch_and_steps(run: Finished):
    processes = run.record["world_size"]
    expected = {
        "precision": "fp32",
        "micro batch": 4 // processes,
        "gradient accumulation": 2,
        "global batch": 8,
        "train size": 64,
        "eval size": 32,
        "steps per epoch": 8,
        "label mode": "sequence",
        "padding": "max_length",
    }
    assert {knob: run.effective(knob) for knob in expected} == expected
    assert run.record["steps_per_epoch"] == 8
    strategy = "DeepSpeed ZeRO-2" if "zero" in run.job_id else "DDP" if "ddp" in run.job_id else "plain"
    assert run.effective("strategy") == strategy
    assert re.search(r"^global batch +8 +8 +micro batch x accumulation x world size$", run.log, re.MULTILINE), run


@uses(*STRATEGIES)
def test_saved_model_is_whole_and_has_the_last_eval_loss(run: Finished):
    model, info = AutoModelForCausalLM.from_pretrained(run.output, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    shapes = stored_shapes(run)
    assert shapes
    assert all(0 not in shape for shape in shapes.values()), shapes
    assert sum(p.numel() for p in model.parameters()) == run.record["parameters"]
    assert eval_loss(model, AutoTokenizer.from_pretrained(run.output)) == pytest.approx(run.losses[-1], abs=TOLERANCE)


@uses(*STRATEGIES, "bf16_plain", "bf16_zero2")
def test_no_file_of_its_checkpoint_is_taken_for_code(run: Finished, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # so that it is unset again
    checkpoints = list(run.output.glob("checkpoint-*"))
    assert checkpoints
    load_weights_only(with_deepspeed=True)
    for checkpoint in checkpoints:
        refuse_foreign_code(checkpoint)


def stored_shapes(run: Finished) -> dict[str, list[int]]:
    shapes = {}
    for path in run.output.glob("*.safetensors"):
        with safe_open(path, "pt") as tensors:
            shapes |= {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118
    return shapes


@torch.no_grad()
def eval_loss(model, tokenizer) -> float:
    """The mean over all tokens of the runs' evaluation questions."""
    losses = []
    model.eval()
    for ids in eval_examples(tokenizer):  # one by one, so that padding cannot matter
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses.append(-logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]))
    return torch.cat(losses).mean().item()


def eval_examples(tokenizer) -> list[list[int]]:
    from datasets import Dataset

    from data_loader import read_questions, tokenise_batch

    rows = list(read_questions(REPOSITORY / TINY["DATASET"], "held out"))
    chosen = Dataset.from_list(rows).shuffle(seed=42).select(range(int(TINY["EVAL_SIZE"])))
    return tokenise_batch(chosen[:], tokenizer, int(TINY["MAX_LENGTH"]), "sequence")["input_ids"]


@pytest.mark.parametrize("config", CONFIGS)
def test_every_config_is_in_the_table(config: str):
    assert {f"{config}-1", f"{config}-2"} <= set(STRATEGIES)


AS_ON_GPUS = """
import torch
from parallel.fsdp_config import shard_on_cpu
from training import trainer

make = trainer.WorkshopTrainer.__init__


def make_as_on_gpus(*arguments, **options):
    shard_on_cpu()  # sets accelerate's distributed_type to MULTI_GPU
    make(*arguments, **options)


class OnTheCPU(torch.nn.parallel.DistributedDataParallel):
    def __init__(self, module, device_ids, output_device, **options):
        super().__init__(module, **options)


torch.nn.parallel.DistributedDataParallel = OnTheCPU
trainer.WorkshopTrainer.__init__ = make_as_on_gpus
"""


@pytest.mark.parametrize(("processes", "effective"), [(1, "plain"), (2, "DDP")])
def test_ddp_on_one_rank_is_no_difference_that_ends_a_run(workplace, processes: int, effective: str):
    """accelerate wraps in DDP on GPUs from two ranks on, on the CPU always."""
    script = patched(workplace, "as_on_gpus", AS_ON_GPUS)
    options = {"TRAIN_SIZE": 16, "EVAL_SIZE": 8, "NUM_EPOCHS": 1, "SAVE_STRATEGY": "no"}
    done = run(workplace, f"ddp_{processes}", script=script, launcher="torchrun", processes=processes, **options)
    assert done.record["knobs"]["strategy"] == {"requested": "DDP", "effective": effective}
