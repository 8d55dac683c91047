"""Tests that the plain Trainer, DDP, every DeepSpeed config and every FSDP strategy train and save the same model."""

import ast
import json
import re

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

import models.custom_model  # noqa: F401  (registers the model with the Auto classes)
from config import DEFAULTS, DataArguments
from data_loader import read_part, tokenise_batch
from distributed.strategy import BY_NAME
from guard.checkpoints import check_contents, forbid_code_in_checkpoints
from guard.preconditions import bytes_to_save
from helpers import REPOSITORY, TINY, Finished
from models.lora import add_adapters
from runs import (
    CHUNKED,
    CONFIGS,
    CUSTOM,
    FSDP,
    GPT_SIZES,
    IN_BF16,
    PYTHON,
    SDPA,
    STRATEGIES,
    TENSOR_PARALLEL,
    TORCHRUN,
    needs_compiler,
    uses,
)
from settings.precision import cpu_has_bf16
from settings.settings import build_settings

TOLERANCE = 1e-4  # the order of fp32 additions may differ; a lost gradient changes the loss far more
BF16_TOLERANCE = 2e-4  # relative; less than the error of a loss that is rounded to bf16 (7.625 instead of 7.62)


def same_losses(run: Finished, expected: Finished) -> None:
    assert expected.losses[0] - expected.losses[1] > 0.05, "equal losses prove nothing if the loss hardly moves"
    assert run.losses == pytest.approx(expected.losses, abs=TOLERANCE, rel=0), run
    assert run.rates == expected.rates[-len(run.rates) :], "a run that resumes logs only the last rates"
    # The mean includes the steps after the last log entry: 8 steps are logged every 5th step
    train_loss = expected.record["train"]["loss_mean"]
    assert run.record["train"]["loss_mean"] == pytest.approx(train_loss, abs=10 * TOLERANCE)


@pytest.mark.promise("README: the same losses")
@uses(*STRATEGIES)
def test_every_epoch_has_the_eval_loss_of_the_plain_trainer(run: Finished, table):
    same_losses(run, table("plain"))


@uses("ddp", "full_shard", "zero2")
def test_each_rank_draws_its_own_random_numbers(run: Finished):
    """With the same numbers, all ranks would have the same dropout masks."""
    saved = sorted(run.output.glob("checkpoint-8/rng_state_*.pth"))
    first, second = (torch.load(path, weights_only=False)["cpu"] for path in saved)
    assert not first.equal(second)


@pytest.mark.promise("ATTENTION=sdpa does not change the training")
@uses(*SDPA)
def test_sdpa_has_the_losses_of_eager_attention(run: Finished, table):
    assert (run.effective("attention"), table("plain").effective("attention")) == ("sdpa", "eager")
    same_losses(run, table("plain"))


@uses(*CHUNKED, pytest.param("compiled", marks=[needs_compiler, pytest.mark.faults]))
def test_chunked_loss_has_the_losses_of_full_logits(run: Finished, table):
    assert (run.effective("loss"), table("plain").effective("loss")) == ("chunked", "full")
    assert run.effective("compiled") is (run.job_id == "compiled")
    same_losses(run, table("plain"))


@pytest.mark.promise("README: the same losses")
@uses(*CUSTOM)
def test_the_custom_gpt_trains_as_bloom_does(run: Finished, table):
    same_losses(run, table("gpt_plain"))
    assert run.record["settings"]["num_layers"] == 2
    if run.job_id == "gpt_full_shard":
        assert (run.effective("FSDP units"), run.effective("local parameter share")) == ("2 blocks", 0.5)


@pytest.mark.promise("Tensor parallelism: the same losses, also in fp16; what it refuses; a stop")
@uses(*TENSOR_PARALLEL)
def test_tensor_parallelism_has_the_losses_of_one_rank(run: Finished, table):
    same_losses(run, table("gpt_plain"))
    groups, size = {"tp2": (1, 2), "tp4": (1, 4), "tp2_fsdp2": (2, 2)}[run.job_id]
    expected = {
        "strategy": "TP" if groups == 1 else "TP x FSDP2",
        "mesh": f"{groups} x {size}",
        # The embedding and, in each of the two blocks, 6 weights and the 4 biases of the layers sharded by outputs
        "cut parameters": 21,
        "world size": groups * size,
        "global batch": 8,
    }
    assert {knob: run.effective(knob) for knob in expected} == expected
    # Each rank of a group holds these parameters in full: positions, norms, biases of the layers sharded by inputs
    whole = 512 * 64 + 5 * 2 * 64 + 2 * 2 * 64
    share = (whole + (run.record["parameters"] - whole) / size) / groups / run.record["parameters"]
    assert run.effective("local parameter share") == pytest.approx(share, abs=1e-4)
    assert f"tokens.weight: ({1024 // (size * groups)}, 64) of (1024, 64) are on rank 0\n" in run.log
    assert "--tensor_parallel writes no checkpoints: a stop ends this run at once, and nothing is saved\n" in run.log
    assert not list(run.output.glob("checkpoint-*"))
    # The ranks of a group compute the same tokens, which must count once
    tokens = table("gpt_plain").record["train"]["real_tokens"]
    assert run.record["train"]["real_tokens"] == tokens


@uses("qwen_tp2_fsdp2", "moe_zero3")
def test_other_models_have_the_losses_of_the_plain_trainer(run: Finished, table):
    model, strategy = {"qwen_tp2_fsdp2": ("qwen", "TP x FSDP2"), "moe_zero3": ("moe", "DeepSpeed ZeRO-3")}[run.job_id]
    same_losses(run, table(f"{model}_plain"))
    assert run.effective("strategy") == strategy


@pytest.mark.skipif(not cpu_has_bf16(), reason="this CPU has no bf16 instructions")
@uses(*IN_BF16)
def test_bf16(run: Finished, table):
    assert run.record["knobs"]["precision"] == {"requested": "bf16", "effective": "bf16"}
    assert re.search(r"^precision +bf16 +bf16$", run.log, re.MULTILINE), run
    differences = [abs(a - b) for a, b in zip(run.losses, table("plain").losses, strict=True)]
    assert max(differences) < 0.1
    # bf16 has 8 significant bits, so losses equal to those of fp32 would mean that the run used fp32
    assert max(differences) > 1e-6
    if run.job_id == "bf16_full_shard":
        ddp = table("bf16_ddp")
        assert run.losses == pytest.approx(ddp.losses, rel=BF16_TOLERANCE)
        # In a training loss, an error from a rounded number of tokens does not average out
        for name in ("loss_mean", "loss_last"):
            assert run.record["train"][name] == pytest.approx(ddp.record["train"][name], rel=BF16_TOLERANCE)
    weights = AutoModelForCausalLM.from_pretrained(run.output, dtype="auto")
    assert weights.dtype == (torch.bfloat16 if run.job_id == "bf16_zero2" else torch.float32)


# 1. The audit


@pytest.mark.promise("what was asked for is what runs")
@uses(*CONFIGS, PYTHON)
def test_deepspeed_runs_what_its_config_says(run: Finished):
    config = "zero1" if run.job_id == PYTHON else run.job_id
    ranks = 1 if run.job_id == PYTHON else 2
    zero = json.loads((REPOSITORY / "ds_configs" / f"{config}.json").read_text())["zero_optimization"]
    assert run.effective("strategy") == f"DeepSpeed ZeRO-{zero['stage']}"
    assert run.effective("world size") == ranks == run.record["world_size"]
    adam = "AdamW (torch, fused)"
    assert run.record["knobs"]["optimizer"] == {"requested": adam, "effective": adam}
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
        "World size": str(ranks),
        "Device": "cpu",
    }


def banner(run: Finished) -> dict[str, str]:
    """Return the lines between the rulers of the DeepSpeed banner. The log must contain the banner once."""
    lines = run.log.splitlines()
    titles = [i for i, line in enumerate(lines) if "Initialization Complete" in line]
    assert len(titles) == 1, run
    block = lines[titles[0] + 2 : titles[0] + 8]
    return dict(line.strip().split(": ") for line in block)


@uses(*FSDP)
def test_fsdp_runs_with_the_requested_strategy_units_and_shards(run: Finished):
    ranks, replicas = (4, 2) if run.job_id == "hybrid_shard_2x2" else (2, 1)
    # On one node, hybrid_shard does not replicate
    names = {"shard_grad_op": "FSDP2 SHARD_GRAD_OP", "hybrid_shard_2x2": "FSDP2 HYBRID_SHARD"}
    expected = {
        "strategy": names.get(run.job_id, "FSDP2 FULL_SHARD"),
        "FSDP units": "2 blocks",
        "local parameter share": replicas / ranks,
        "mesh": f"{replicas} x {ranks // replicas}",
        "CPU offload": False,
        "checkpointed blocks": 2 if "checkpointing" in run.job_id else 0,
        "checkpoint format": "FULL_STATE_DICT",
        "world size": ranks,
    }
    assert {knob: run.effective(knob) for knob in expected} == expected
    # accelerate wraps these modules in addition to the blocks
    assert "and BloomForCausalLM, Embedding, LayerNorm, Linear\n" in run.log


DEGREES = {
    "plain": "plain on 1 rank",
    "ddp": "DDP on 2 ranks = 2 replicas",
    "zero0": "DeepSpeed ZeRO-0 on 2 ranks = 2 replicas",
    TORCHRUN: "DeepSpeed ZeRO-2 on 2 ranks = 2 shards",
    "shard_grad_op": "FSDP2 SHARD_GRAD_OP on 2 ranks = 2 shards",
    "hybrid_shard_2x2": "FSDP2 HYBRID_SHARD on 4 ranks = 2 replicas x 2 shards",
    "tp2": "TP on 2 ranks = 2 ranks per tensor group",
    "tp2_fsdp2": "TP x FSDP2 on 4 ranks = 2 shards x 2 ranks per tensor group",
}


@uses(*DEGREES)
def test_the_first_lines_say_how_the_strategy_divides_the_ranks(run: Finished):
    assert f"\nstrategy: {DEGREES[run.job_id]}\n" in run.log.partition("\nknob ")[0], run


@uses("plain", "ddp", TORCHRUN)
def test_audit_shows_batch_and_steps(run: Finished):
    expected = {
        "strategy": {"plain": "plain", "ddp": "DDP", TORCHRUN: "DeepSpeed ZeRO-2"}[run.job_id],
        "precision": "fp32",
        "micro batch": 4 // run.record["world_size"],
        "gradient accumulation": 2,
        "global batch": 8,
        "train size": 32,
        "eval size": 16,
        "steps per epoch": 4,
        "label mode": "sequence",
        "padding": "max_length",
    }
    assert {knob: run.effective(knob) for knob in expected} == expected
    assert run.record["steps_per_epoch"] == 4
    assert re.search(r"^global batch +8 +8 +micro batch x accumulation x world size$", run.log, re.MULTILINE), run


# 2. The saved model and checkpoints


@pytest.mark.promise("saved models give the loss they were saved with")
@uses(*STRATEGIES, *CUSTOM, *TENSOR_PARALLEL)
def test_saved_model_is_complete_and_has_the_last_eval_loss(run: Finished):
    model, info = AutoModelForCausalLM.from_pretrained(run.output, dtype=torch.float32, output_loading_info=True)
    assert not any(info.values()), info
    assert sum(p.numel() for p in model.parameters()) == run.record["parameters"]
    assert eval_loss(model, AutoTokenizer.from_pretrained(run.output)) == pytest.approx(run.losses[-1], abs=TOLERANCE)
    files = [path for path in run.output.rglob("*") if path.suffix in (".json", ".safetensors")]
    assert len({path.stat().st_mode for path in files}) == 1, "weights must be as readable as other files"


@torch.no_grad()
def eval_loss(model, tokenizer) -> float:
    """Mean loss over all tokens of the runs' evaluation questions."""
    rows = read_part("eval", DataArguments(dataset=str(REPOSITORY / TINY["DATASET"]))).rows
    chosen = rows.shuffle(seed=42).select(range(int(TINY["EVAL_SIZE"])))
    losses = []
    model.eval()
    # One question at a time needs no padding
    for ids in tokenise_batch(chosen[:], tokenizer, int(TINY["MAX_LENGTH"]), "sequence")["input_ids"]:
        logits = model(torch.tensor([ids])).logits[0, :-1]
        losses.append(-logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None]))
    return torch.cat(losses).mean().item()


SAVED = ("plain", "ddp", "zero0", "zero2", "zero3", "full_shard", "bf16_zero2")


@uses(*SAVED, "lora_plain", "lora_zero3", "lora_bf16_plain", "lora_bf16_zero1", "lora_bf16_full_shard")
def test_a_checkpoint_has_the_estimated_size(run: Finished):
    """Only files with tensors count, because the other files are negligible for a real model."""
    folder = next(run.output.glob("checkpoint-*"))
    files = [path for kind in ("*.pt", "*.bin", "*.safetensors") for path in folder.rglob(kind)]
    settings = build_settings(DEFAULTS | run.record["settings"])
    meta_model = AutoModelForCausalLM.from_pretrained(run.output)
    if settings.model.lora_rank:
        add_adapters(meta_model, settings.model.lora_rank)
    checkpoint, model = bytes_to_save(settings, meta_model, BY_NAME[run.effective("strategy")])
    headers = 100_000  # up to 1 kB per tensor and file
    assert sum(path.stat().st_size for path in files) == pytest.approx(checkpoint, rel=0.03, abs=headers)
    saved = [run.output / "model.safetensors", *run.output.glob("adapter/*.safetensors")]
    assert sum(path.stat().st_size for path in saved) == pytest.approx(model, rel=0.03)


@uses("plain", "zero1", "zero2", "zero2_cpu_offload", "zero3", "full_shard", "bf16_zero2")
def test_a_checkpoint_holds_no_file_that_could_run_code(run: Finished, monkeypatch):
    monkeypatch.setenv("TORCH_FORCE_WEIGHTS_ONLY_LOAD", "1")  # after the test, monkeypatch restores this variable
    (checkpoint,) = run.output.glob("checkpoint-*")
    forbid_code_in_checkpoints(with_deepspeed=True)
    check_contents(checkpoint, AutoModelForCausalLM.from_pretrained(run.output))


# 3. Waiting for the GPU

# Record which functions read a number from a tensor during training. On a GPU, such a function waits for all earlier
# kernels.
READING = """
import atexit, collections, traceback
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from training.trainer import WorkshopTrainer

readers = collections.Counter()
aten = torch.ops.aten
READING_OPERATORS = {aten._local_scalar_dense.default, aten.nonzero.default, aten.allclose.default}


def note_reader():
    callers = [frame for frame in traceback.extract_stack() if "/torch/" not in frame.filename]
    readers[callers[-3].name] += 1  # the last two callers are functions of this patch


class Reading(TorchDispatchMode):
    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function in READING_OPERATORS:
            note_reader()
        return function(*args, **(kwargs or {}))


def tolist(tensor, original=torch.Tensor.tolist):
    note_reader()
    return original(tensor)


torch.Tensor.tolist = tolist  # on the CPU, tolist calls no operator


def watched(*args, original=WorkshopTrainer._inner_training_loop, **kwargs):
    with Reading():
        return original(*args, **kwargs)


WorkshopTrainer._inner_training_loop = watched
atexit.register(lambda: print("read by", dict(readers)))
"""


@pytest.mark.parametrize(
    ("model", "loss", "reads_of_loss"),
    [
        ("tiny-bloom", "full", {}),
        ("custom-gpt", "full", {}),
        # Each step counts its labels, and the first micro batch checks the model's output
        ("tiny-bloom", "chunked", {"add_label_counts": 2, "loss_function": 1}),
    ],
)
def test_moving_a_micro_batch_does_not_wait_for_the_gpu(train, model, loss, reads_of_loss):
    sizes = GPT_SIZES | {"VOCAB_SIZE": 2048, "TOKENIZER_NAME": "tiny-bloom"} if model == "custom-gpt" else {}
    few = {"TRAIN_SIZE": 8, "EVAL_SIZE": 4, "NUM_EPOCHS": 1, "BATCH_SIZE": 1, "GRAD_ACC": 4, "SAVE_STRATEGY": "no"}
    words = ("--eval_strategy", "no", "--logging_steps", 9)
    name = f"reading_{model}_{loss}"
    run = train(name, *words, patch=READING, MODEL_NAME=model, LOSS=loss, **few, **sizes)
    (line,) = [line for line in run.log.splitlines() if line.startswith("read by ")]
    assert ast.literal_eval(line.removeprefix("read by ")) == {
        "__iter__": 3,  # accelerate's data loader reads the seed and the order of the epoch
        "check_loss": 2,  # whether the loss is finite, once in each step
        "_maybe_log_save_evaluate": 2,  # loss and gradient norm for the log line
        "_finalize_training": 1,  # the mean of all losses
        "log": 2,  # losses that are not finite: their sum since the last log line, and the number of their steps
        "gather_tokens": 3,  # token counts at the end of the training
        **reads_of_loss,
    }
