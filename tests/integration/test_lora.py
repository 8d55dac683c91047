"""Tests of LoRA under every strategy: equal losses, held bytes, the saved model, and runs that resume.

The base of all runs is the trained model of the run "plain", because a random base would hide a frozen weight that
changes. tests/unit/test_adapters.py tests the layers themselves.
"""

import json
import shutil
from collections.abc import Iterable

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from helpers import Finished, add_peft_adapters
from runs import (
    ADAPTERS,
    LORA,
    LORA_BF16,
    LORA_COMPILED,
    LORA_FP16,
    LORA_OTHER_MODELS,
    MORE_LORA,
    RUNS,
    needs_compiler,
    uses,
)
from settings.precision import cpu_has_bf16
from test_strategies import BF16_TOLERANCE, TOLERANCE, eval_loss
from workbench import STEP, complete_marks, patch_call

IN_MAKE_TEST = {f"lora_{name}" for name in ("plain", "ddp", "zero1", "zero2", "zero3", "full_shard", "chunked_plain")}
IN_MAKE_TEST |= {f"lora_bf16_{name}" for name in ("plain", "zero1", "zero3", "full_shard")}
IN_MAKE_TEST |= {"lora_chat_plain", "lora_chat_plain_full_shard"}
FP32_TOLERANCE = 1e-5  # relative; the strategies differ by less than 1e-6
RESUME = "--resume_from_checkpoint"
BASE_PARAMETERS = 231_296  # tiny-bloom
# Inputs and outputs of the layers in each of the two blocks: query_key_value, dense, dense_h_to_4h, dense_4h_to_h
ADAPTED_LAYERS = 2 * [(64, 192), (64, 64), (64, 256), (256, 64)]
ADAPTER_ELEMENTS = sum(ADAPTERS["LORA_RANK"] * (inputs + outputs) for inputs, outputs in ADAPTED_LAYERS)
STRATEGIES_OF_LORA = [name for name in (*LORA, *LORA_BF16) if "chunked" not in name]


def chosen(names: Iterable[str], in_make_test: Iterable[str] = IN_MAKE_TEST) -> list:
    """Return parameters for pytest. `make test` runs those in `in_make_test`, and `make test-faults` the others."""
    marks = {name: [] if name in in_make_test else [pytest.mark.faults] for name in names}
    for name in marks:
        if name in LORA_BF16:
            marks[name].append(pytest.mark.skipif(not cpu_has_bf16(), reason="this CPU has no bf16 instructions"))
        if name in LORA_COMPILED:
            marks[name].append(needs_compiler)
    return [pytest.param(name, marks=marks[name]) for name in marks]


def parts(run: Finished) -> tuple[str, str]:
    """Strategy and precision of a run, from its name."""
    name = run.job_id.removeprefix("lora_")
    precision = name.split("_")[0] if name.startswith(("bf16_", "fp16_")) else "fp32"
    return name.removeprefix(f"{precision}_"), precision


# 1. The training


def equal_losses(run: Finished, expected: Finished, tolerance: float) -> None:
    assert run.losses == pytest.approx(expected.losses, rel=tolerance), run
    train_loss = expected.record["train"]["loss_mean"]
    assert run.record["train"]["loss_mean"] == pytest.approx(train_loss, rel=tolerance)


@pytest.mark.promise("LoRA: the same losses under every method, and the bytes of the formula")
@uses(*chosen(LORA | MORE_LORA | LORA_COMPILED | LORA_BF16 | LORA_FP16))
def test_every_strategy_has_the_losses_of_the_plain_trainer(run: Finished, table):
    _, precision = parts(run)
    plain = table("lora_plain")
    assert plain.losses[0] < table("plain").losses[-1] - 0.1, "equal losses prove nothing if the loss hardly moves"
    expected = plain if precision == "fp32" else table(f"lora_{precision}_plain")
    equal_losses(run, expected, BF16_TOLERANCE if precision == "bf16" else FP32_TOLERANCE)
    differences = [abs(a - b) for a, b in zip(run.losses, plain.losses, strict=True)]
    if precision != "fp32":
        assert 1e-6 < max(differences) < 0.01, "losses equal to those of fp32 would mean that the run used fp32"


@uses(*chosen(LORA_OTHER_MODELS))
def test_other_models_have_the_losses_of_the_plain_trainer(run: Finished, table):
    """Qwen2 and the GPT have biases in their linear layers. In a chat, few tokens count."""
    base = table(RUNS[run.job_id].base)
    plain = table(f"lora_{base.job_id}")
    # These bases are so small that only the loss of the training questions falls
    assert plain.record["train"]["loss_mean"] < base.losses[-1] - 0.05
    equal_losses(run, plain, FP32_TOLERANCE)
    check_merged(run, base)


def knob(run: Finished, name: str) -> tuple[str, str]:
    """Requested and effective value of a knob."""
    entry = run.record["knobs"][name]
    return entry["requested"], entry["effective"]


@pytest.mark.promise("LoRA: the same losses under every method, and the bytes of the formula")
@uses(*chosen(LORA | LORA_BF16))
def test_audit_and_record_show_what_is_trained(run: Finished):
    strategy, precision = parts(run)
    count = f"{ADAPTER_ELEMENTS:,}"
    trainable = precision if "zero" in strategy else "fp32"  # DeepSpeed has fp32 masters of its trainable weights
    assert knob(run, "trainable parameters") == (count, count)
    assert knob(run, "trainable weights") == (trainable, trainable)
    assert knob(run, "frozen weights") == (precision, precision)
    assert run.record["trainable_parameters"] == ADAPTER_ELEMENTS
    assert "\nLoRA: adapters on query_key_value, dense, dense_h_to_4h, dense_4h_to_h\n" in run.log
    assert run.record["parameters"] == BASE_PARAMETERS + ADAPTER_ELEMENTS


def held_by_formula(strategy: str, size: int) -> dict[str, int]:
    """Bytes that each of two ranks holds, or the only rank of the plain Trainer.

    size: bytes of an element in the precision of the computation.
    """
    frozen, trained, ranks = BASE_PARAMETERS, ADAPTER_ELEMENTS, 2
    counters = 4 * 2 * len(ADAPTED_LAYERS)  # Adam counts the steps of each tensor in 4 bytes
    one_counter = 4  # DeepSpeed puts all adapters of a rank into one tensor
    masters_and_moments = 12 * trained // ranks + one_counter
    # A base in 16-bit precision has no masters, and adapters in fp32 are their own masters
    replicated = (size * frozen + 4 * trained, 4 * trained, 8 * trained + counters)
    parameters, gradients, optimizer_state = {
        "plain": replicated,
        "ddp": replicated,
        "zero1": (size * (frozen + trained), size * trained, masters_and_moments),
        "zero2": (size * (frozen + trained), size * trained // ranks, masters_and_moments),
        "zero3": (size * (frozen + trained) // ranks, size * trained // ranks, masters_and_moments),
        # Gradients are whole while they accumulate
        "full_shard": ((size * frozen + 4 * trained) // ranks, size * trained, 8 * trained // ranks + counters),
    }[strategy]
    return {"parameters": parameters, "gradients": gradients, "optimizer_state": optimizer_state}


@pytest.mark.promise("LoRA: the same losses under every method, and the bytes of the formula")
@uses(*chosen(STRATEGIES_OF_LORA))
def test_each_rank_holds_the_bytes_of_the_formula(run: Finished):
    strategy, precision = parts(run)
    expected = held_by_formula(strategy, 4 if precision == "fp32" else 2)
    assert run.record["held"] == [expected] * run.record["world_size"]


# 2. The saved model


def check_merged(run: Finished, base: Finished) -> None:
    """Check that the weights of a saved model are the base's plus the adapters of the last checkpoint.

    ZeRO in 16-bit precision also saves its adapters in it, so a merged weight has what the training computed with.
    """
    (checkpoint,) = run.output.glob("checkpoint-*")
    files = [folder / name for folder in (checkpoint, run.output) for name in ("config.json", "model.safetensors")]
    assert len({path.stat().st_mode for path in files}) == 1, "weights must be as readable as other files"
    last, before = load_file(checkpoint / "model.safetensors"), load_file(base.output / "model.safetensors")
    saved = load_file(run.output / "model.safetensors")
    assert saved.keys() == before.keys(), "a tied head is saved once"
    assert {weight.dtype for weight in saved.values()} == {torch.float32}
    merged = 0
    for name, weight in before.items():
        frozen = last[name]
        assert torch.equal(frozen, weight.to(frozen.dtype)), f"{name} must not change"
        expected = frozen.float()
        layer = name.removesuffix(".weight")
        if f"{layer}.lora_a" in last:
            merged += 1
            change = 2 * last[f"{layer}.lora_b"].float() @ last[f"{layer}.lora_a"].float()
            assert change.abs().max() > 1e-3, name
            expected = expected + change
        assert torch.allclose(saved[name], expected, rtol=0, atol=1e-6), name
    assert 2 * merged == sum(name.endswith(("lora_a", "lora_b")) for name in last)
    check_for_peft(run, base, frozen.dtype)


@torch.no_grad()
def check_for_peft(run: Finished, base: Finished, dtype: torch.dtype) -> None:
    """Check that the base and the adapters for PEFT compute what the merged model does. dtype: that of the base."""
    folder = run.output / "adapter"
    files = [run.output / "config.json", folder / "adapter_config.json", folder / "adapter_model.safetensors"]
    assert len({path.stat().st_mode for path in files}) == 1, "adapters must be as readable as other files"
    assert json.loads(files[1].read_text())["base_model_name_or_path"] == f"output/{base.job_id}"
    assert f"output/{run.job_id}/adapter for PEFT; load their base with dtype={dtype}, as in the training\n" in run.log
    tokens = AutoTokenizer.from_pretrained(folder)("Nodes send data over a network.", return_tensors="pt").input_ids
    frozen = AutoModelForCausalLM.from_pretrained(base.output, dtype=dtype).float()
    merged = AutoModelForCausalLM.from_pretrained(run.output, dtype=torch.float32)
    assert (add_peft_adapters(frozen, folder)(tokens).logits - merged(tokens).logits).abs().max() < 1e-6


@pytest.mark.promise("LoRA: the saved model is merged; a checkpoint resumes exactly")
@uses(*chosen(STRATEGIES_OF_LORA))
def test_saved_weights_are_the_base_plus_the_adapters_in_fp32(run: Finished, table):
    check_merged(run, table("plain"))
    assert json.loads((run.output / "config.json").read_text())["dtype"] == "float32"


@pytest.mark.promise("LoRA: the saved model is merged; a checkpoint resumes exactly")
@uses(*chosen(["lora_plain", "lora_zero3", "lora_full_shard", "lora_bf16_zero3"]))
def test_saved_model_has_the_last_eval_loss(run: Finished):
    model, loading = AutoModelForCausalLM.from_pretrained(run.output, dtype="auto", output_loading_info=True)
    assert not any(loading.values()), loading
    assert model.dtype == torch.float32
    assert sum(each.numel() for each in model.parameters()) == BASE_PARAMETERS
    assert model.lm_head.weight is model.transformer.word_embeddings.weight
    tolerance = 2e-3 if "bf16" in run.job_id else TOLERANCE  # a run in bf16 computes this loss in bf16
    loss = eval_loss(model, AutoTokenizer.from_pretrained(run.output))
    assert loss == pytest.approx(run.losses[-1], abs=tolerance), run


# 3. Runs that resume

# The last rank sends the signal in its 21st micro batch, which is the first one of step 11
STOP = "if os.environ.get('RANK', '0') == '{last}': os.kill(os.getpid(), signal.SIGTERM)"


RESUMED = [f"lora_{name}" for name in ("plain", "zero3", "full_shard", "chat_plain")]
ALL_RESUMED = [*STRATEGIES_OF_LORA, "lora_shard_grad_op", "lora_chunked_full_shard", "lora_chat_plain"]


@pytest.mark.promise("LoRA: the saved model is merged; a checkpoint resumes exactly")
@pytest.mark.parametrize("name", chosen(ALL_RESUMED, in_make_test=RESUMED))
def test_a_stopped_run_resumes_exactly_from_its_checkpoint_alone(train, table, workplace, name: str):
    """The checkpoint holds the frozen weights, too: when the run resumes, its base contains only zeros."""
    row, expected = RUNS[name], table(name)
    base = workplace / "output" / f"base_of_{name}"
    shutil.copytree(table(row.base).output, base, ignore=shutil.ignore_patterns("checkpoint-*"))
    how = row.settings | {"ranks": row.ranks, "MODEL_NAME": f"output/{base.name}"}
    plain = name == "lora_plain"  # saves only its adapters
    how |= {"SAVE_MERGED": not plain, "EM_F1": plain}
    file = "adapter/adapter_model.safetensors" if plain else "model.safetensors"
    patch = patch_call(STEP, 11, STOP.format(last=row.world - 1))
    stopped = train(f"{name}_stopped", *row.arguments, patch=patch, code=75, **how)
    assert stopped.record["status"] == "stopped"
    assert complete_marks(stopped.output) == {"checkpoint-6": True}
    weights = load_file(base / "model.safetensors")
    zeros = {key: torch.zeros_like(weight) for key, weight in weights.items()}
    save_file(zeros, base / "model.safetensors", {"format": "pt"})
    resumed = train(f"{name}_stopped", *row.arguments, RESUME, **how)
    assert resumed.record["resumed_from"] == f"output/{name}_stopped/checkpoint-6"
    assert resumed.losses == expected.losses, resumed
    assert (resumed.output / file).read_bytes() == (expected.output / file).read_bytes()
    assert [(resumed.output / "config.json").exists(), "f1" in resumed.record] == [not plain, plain]
