"""Check the output of estimate_memory.py, and compare its counts with a real model. tests/integration has real runs."""

import json
import re
from functools import partial
from pathlib import Path

import pytest
import torch
from torch.nn import functional
from transformers import AutoModelForCausalLM, BloomConfig, MixtralConfig

import estimate_memory
import gpu_check
from estimate.command_line import parse_memory_plan
from estimate.compare import ORDER_TO_TRY
from estimate.memory import estimate_parts, parts_at_peak, power_of_two, sums_by_interval, totals
from estimate.model_shape import device_rules, trace_shape
from estimate_memory import memory_table
from helpers import REPOSITORY
from models.bloom_sdpa import use_attention
from settings.settings import Settings
from shared.json_files import read_json
from shared.units import GIB


def plan(*flags: object) -> Settings:
    return parse_memory_plan([str(flag) for flag in flags], environment={})


def estimated(*flags: object) -> dict[str, float]:
    """Return the bytes of each part on a GPU when a step needs the most memory."""
    return {part.name: part.gpu for part in parts_at_peak(estimate_parts(plan(*flags)))}


SIZES = {"vocab_size": 2048, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "use_cache": False}
BLOOM = BloomConfig(**SIZES)
MIXTRAL = MixtralConfig(**SIZES, num_key_value_heads=2, intermediate_size=96)


@pytest.mark.parametrize(
    ("config", "attention", "parameters"),
    [(BLOOM, "eager", 231_296), (BLOOM, "sdpa", 231_296), (MIXTRAL, "eager", 582_976)],
    ids=["bloom-eager", "bloom-sdpa", "mixtral-eager"],
)
def test_activations_agree_with_those_that_autograd_keeps(config, attention, parameters, tmp_path):
    config.save_pretrained(tmp_path)
    flags = ("--model_name", tmp_path, "--max_length", 100, "--fp16", "False", "--attention", attention)
    shape = trace_shape(plan(*flags))
    model = AutoModelForCausalLM.from_config(config).train()
    use_attention(model, attention)
    own, kept = {p.untyped_storage().data_ptr() for p in model.parameters()}, {}

    def keep(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
        return tensor

    tokens = torch.ones(4, 100, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        model(input_ids=tokens, attention_mask=tokens, labels=tokens)
    log_softmax = 4 * 100 * 2048 * 4
    real = sum(storage.nbytes() for place, storage in kept.items() if place not in own) - log_softmax
    assert shape.peaks["loss"].activations == pytest.approx(real, rel=0.02)
    assert (shape.parameters, len(shape.block_sizes)) == (parameters, 2)


@pytest.mark.parametrize("precision", [("--bf16",), ("--fp16", "False")])
def test_the_full_loss_needs_twelve_bytes_per_logit(precision):
    """The saved log-softmax and two gradients of its size are in fp32, also under autocast."""
    assert estimated("--model_name", "tiny-bloom", *precision)["logits"] == 12 * 4 * 512 * 2048


@pytest.mark.parametrize(
    "function",
    [
        torch.nn.LayerNorm(4, dtype=torch.bfloat16),
        torch.nn.RMSNorm(4, dtype=torch.bfloat16),
        partial(functional.softmax, dim=-1),
        functional.softplus,
        torch.rsqrt,
        torch.Tensor.exp,
        lambda x: x**2,
        lambda x: x.sum(-1),
    ],
)
def test_functions_that_autocast_computes_in_fp32_only_on_a_gpu_are_traced_in_fp32(function):
    x = torch.ones(4, dtype=torch.bfloat16)
    with device_rules(on_cpu=False):
        assert function(x).dtype == torch.bfloat16, "without autocast, nothing is cast"
        with torch.autocast("cpu", dtype=torch.bfloat16):
            assert function(x).dtype == torch.float32
    with device_rules(on_cpu=True), torch.autocast("cpu", dtype=torch.bfloat16):
        assert function(x).dtype == torch.bfloat16


def test_a_gpu_needs_more_for_lora_because_blooms_residual_stream_is_in_fp32():
    """The CPU's autocast computes the layer norm after the frozen embedding, and the sums after it, in bf16."""
    flags = ("--model_name", "tiny-bloom", "--bf16", "--gpus", 4, "--lora_rank", 8)
    gpu, cpu = (totals(estimate_parts(plan(*flags, *more)), 4)[0] for more in ((), ("--use_cpu",)))
    stream = 4 * 512 * 64  # elements; each of the 2 layers keeps it twice, with 2 bytes more per element
    assert gpu - cpu == pytest.approx(2 * 2 * 2 * stream, rel=0.05)


def test_a_tensor_group_shards_embedding_and_head_but_not_logits():
    one, four = (
        trace_shape(plan("--model_name", "custom-gpt", "--bf16", "--tensor_parallel", n)).peaks for n in (1, 4)
    )
    assert four["loss"].logits == one["loss"].logits == 12 * 4 * 512 * 50_000
    assert [four[interval].head for interval in four] == [one[interval].head / 4 for interval in one]


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        # bytes per parameter of bloom-560m: parameters, gradients, optimizer state (arXiv:1910.02054, figure 1)
        ((), (4, 4, 8)),
        (("--optim", "sgd"), (4, 4, 0)),
        (("--fsdp", "--optim", "rmsprop"), (1, 2, 1)),
        (("--deepspeed", "ds_configs/zero0.json"), (2, 2, 12)),
        (("--deepspeed", "ds_configs/zero1.json"), (2, 2, 3)),
        (("--deepspeed", "ds_configs/zero3.json"), (0.5, 0.5, 3)),
        (("--fsdp", "--gradient_accumulation_steps", "1"), (1, 1, 2)),
        (("--fsdp",), (1, 2, 2)),
        # offloaded to the memory of the node
        (("--deepspeed", "ds_configs/zero1_cpu_offload.json"), (2, 2, 0)),
        (("--deepspeed", "ds_configs/ds_zero3_offload.json"), (0, 0, 0)),
    ],
)
def test_bytes_per_parameter_on_four_gpus(in_the_repository, flags, expected):
    held = estimate_parts(plan(*flags, "--gpus", 4))
    assert [part.gpu / 559_214_592 for part in held[:3]] == pytest.approx(expected)


def test_with_checkpointing_the_chunked_loss_needs_autocasts_copies_of_all_weights(tmp_path):
    """Autocast frees the copies after the forward pass. With the full loss, the peak is in the backward pass."""
    BloomConfig(**SIZES | {"vocab_size": 64, "num_hidden_layers": 8}).save_pretrained(tmp_path)
    small = ("--model_name", tmp_path, "--activation_checkpointing", "--loss", "chunked", "--max_length", 8)
    copies = 2 * trace_shape(plan(*small)).parameters
    assert copies < estimated(*small)["activations"] + estimated(*small)["head"]


def test_parts_that_exist_at_different_moments_are_not_added(in_the_repository):
    zero2 = ("--deepspeed", "ds_configs/zero2.json", "--gpus", 2)
    parts = estimate_parts(plan(*zero2))
    on_gpu, _ = sums_by_interval(parts)
    assert totals(parts, 2)[0] == max(on_gpu.values()) == sum(estimated(*zero2).values())
    gradients_of_step = [part for part in parts if part.note == "fp32 gradients of the shard"]
    assert [part.intervals for part in gradients_of_step] == [("step",)]
    once = sums_by_interval(estimate_parts(plan("--gradient_accumulation_steps", 1)))[0]
    several = sums_by_interval(estimate_parts(plan()))[0]
    gradients = 4 * 559_214_592
    assert several["loss"] - once["loss"] == gradients  # with several micro batches, they exist from the first one on
    assert several["embedding"] == once["embedding"]


def test_the_chunked_loss_holds_one_chunk_and_the_gradient_of_the_head():
    full, chunked = (estimated("--loss", loss) for loss in ("full", "chunked"))
    vocabulary, hidden = 250_880, 1024
    rows = 4 * 2**26  # fp32 copy of some rows of a chunk's logits
    # logits of a chunk, and autocast's copy of the weight
    assert chunked["loss"] == 2 * vocabulary * (1024 + hidden) + rows
    assert chunked["head"] == 4 * vocabulary * hidden  # the gradient of the weight
    assert "logits" not in chunked
    state = ("parameters", "gradients", "optimizer state", "buffers")
    assert [full[part] for part in state] == [chunked[part] for part in state]


def test_the_memory_of_a_node_counts_loading_and_python(in_the_repository):
    settings = plan("--deepspeed", "ds_configs/zero3.json", "--gpus", 4)
    on_node = totals(estimate_parts(settings), 4)[1]
    python = next(part.cpu for part in estimate_parts(settings) if part.name == "Python, libraries")
    weights = 4 * 559_214_592  # for ZeRO-3, transformers loads the weights only on rank 0
    assert on_node == pytest.approx(weights + 4 * python, rel=0.01)
    text = memory_table(settings)
    (line,) = re.findall(r"^for sbatch: --mem=(\d+)G ", text, re.MULTILINE)
    assert int(line) == pytest.approx(1.2 * on_node / GIB + 4 * 2, abs=1)


def pinned_unused(*flags: str) -> float:
    parts = {part.name: part.cpu for part in estimate_parts(plan(*flags))}
    return parts.get("pinned, unused", 0) / GIB


def test_pinned_blocks_are_rounded_up_to_powers_of_two(in_the_repository):
    """The 2.08 GiB of bloom-560m in fp32 take 4 GiB, and its 1.04 GiB in fp16 take 2 GiB."""
    assert [power_of_two(size) for size in (1, 2, 3, 4.1)] == [1, 2, 4, 8]
    assert pinned_unused("--deepspeed", "ds_configs/zero2.json") == 0
    assert pinned_unused("--deepspeed", "ds_configs/zero2_cpu_offload.json") == 0
    whole = 559_214_592 * 4 / GIB
    # The minimum counts the fp32 master weights, the fp32 gradients and the 16-bit copy. The buffer for the largest
    # gradient and the single gradients add a little
    least = 2 * (4 - whole) + (2 - whole / 2)
    pinned = pinned_unused("--deepspeed", "ds_configs/zero2_cpu_offload_pinned_memory.json")
    assert least < pinned < least + 0.2
    # ZeRO-3 always pins offloaded parameters. With pin_memory it also pins the gradients, in 16-bit precision and fp32
    assert pinned_unused("--deepspeed", "ds_configs/zero3_cpu_offload.json") == pytest.approx(2 - whole / 2)
    everything = pinned_unused("--deepspeed", "ds_configs/ds_zero3_offload.json")
    assert 2 * (2 - whole / 2) + (4 - whole) + whole / 2 < everything < 7
    assert pinned_unused("--fsdp", "--fsdp_config", "fsdp_configs/full_shard_cpu_offload.json") > 0


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--gpus", "0"], "error: --gpus: 0 is out of range; give a number of at least 1"),
        (["--gpu", "3"], "error: --gpu: unknown flag; did you mean --gpus?"),
        (["--deepspeed", "nope.json"], "error: nope.json: No such file or directory; "),
        (["--optim", "adafactor"], "error: --optim: adafactor cannot be estimated, only "),
        (["--optim", "sgd", "--optim_args", "momentum=0.9"], "error: --optim: sgd cannot be estimated, only "),
        (["--compare", "--fsdp"], "error: --fsdp: cannot be combined with --compare, "),
        # BLOOM's own attention is eager
        (["--padding", "none"], "error: --padding: none needs --attention sdpa; give it, or use --padding longest"),
    ],
)
def test_mistakes_are_one_line(flags, message, refusal, main_of, capsys):
    assert refusal(main_of, estimate_memory, *flags).startswith(message)
    assert capsys.readouterr() == ("", "")


def test_a_model_that_cannot_be_traced_is_one_line(tmp_path, refusal, main_of, capfd):
    # the experts of JetMoe read the number of their tokens
    config = {"model_type": "jetmoe", "hidden_size": 64, "num_hidden_layers": 1, "num_key_value_heads": 2}
    (tmp_path / "config.json").write_text(json.dumps(config))
    line = refusal(main_of, estimate_memory, "--model_name", tmp_path)
    assert re.fullmatch(rf"error: --model_name: .*{tmp_path} cannot be traced.*; .+", line)
    assert capfd.readouterr() == ("", "")


# --compare


@pytest.fixture
def compared(main_of, capsys):
    """Return a function that gives the cells of each config's row, and the whole output."""

    def run(*flags: object) -> tuple[dict[str, list[str]], str]:
        main_of(estimate_memory, "--compare", *flags)
        text = capsys.readouterr().out
        found = re.findall(r"^(\S+_configs/\S+|DDP|plain) +(\d.*?)(?: <- try first)?$", text, re.MULTILINE)
        return {name: re.split(r" {2,}", rest.strip()) for name, rest in found}, text

    return run


def names_of(rows: dict[str, list[str]], verdict: str) -> list[str]:
    """Return the names of the configs with a verdict, in the order of their rows."""
    return [Path(name).stem for name, cells in rows.items() if cells[2] == verdict]


def test_all_configs_are_compared_and_those_that_fit_come_first(compared):
    rows, text = compared("--gpus", 4, "--gpu_memory", 18, "--cpu_memory", 20)
    files = {f"{path.parent.name}/{path.name}" for path in REPOSITORY.glob("*_configs/*.json")}
    assert rows.keys() == files | {"DDP"}
    verdicts = [cells[2] for cells in rows.values()]
    assert verdicts == sorted(verdicts, key=["fits", "is tight", "does not fit"].index)
    assert set(verdicts) == {"fits", "is tight", "does not fit"}
    simplest = ["zero1", "shard_grad_op", "zero2", "full_shard"]
    assert names_of(rows, "fits")[:4] == simplest, "and not those that need the least memory"
    order = [list(map(ORDER_TO_TRY.index, names_of(rows, word))) for word in ("fits", "is tight", "does not fit")]
    assert order == [sorted(places) for places in order]
    assert re.findall(r"^(\S+).* <- try first$", text, re.MULTILINE) == [next(iter(rows))]
    shown = memory_table(plan("--gpus", 4, "--deepspeed", REPOSITORY / "ds_configs/zero3.json"))
    assert f"one GPU: {rows['ds_configs/zero3.json'][0]} GiB" in shown


def test_ranks_that_share_a_gpu_share_its_memory(compared, monkeypatch):
    monkeypatch.setenv("RANKS_PER_GPU", "4")
    shared, _ = compared("--gpus", 4, "--gpu_memory", 72)
    monkeypatch.delenv("RANKS_PER_GPU")
    assert shared == compared("--gpus", 4, "--gpu_memory", 18)[0] != compared("--gpus", 4, "--gpu_memory", 72)[0]


def test_without_a_memory_there_is_no_verdict_and_a_config_that_cannot_be_combined_has_its_reason(compared):
    rows, text = compared("--gpus", 1)
    assert "plain" in rows and all(len(cells) == 2 for cells in rows.values())
    assert "for a verdict: --gpu_memory" in text and "is not judged" not in text
    rows, text = compared("--gpus", 1, "--gpu_memory", 80)
    assert "the memory of a node is not judged: give --cpu_memory" in text
    assert "fsdp_configs/hybrid_shard_2x2.json" not in rows
    refused = text.split("cannot be combined with these options:\n")[1]
    assert "dp_shard_size 2 x dp_replicate_size 2 is not the world size 1" in refused


def test_peaks_on_a_gpu_are_as_estimated():
    """Compare today's estimate with the peaks measured on an H200. A compiled model keeps fewer tensors."""
    measured = read_json(REPOSITORY / "benchmarks/gpu_check.json", "run make gpu-check")
    for row in gpu_check.ROWS:
        if row.name in measured["rows"]:
            result = measured["rows"][row.name]
            settings = parse_memory_plan(gpu_check.training_command(row)[2:], environment=gpu_check.FULL)
            estimated = totals(estimate_parts(settings), 1)[0] / GIB
            assert result["estimated_gib"] == pytest.approx(estimated, rel=1e-3), row.name
            if row.name not in ("bloom-560m-compiled", "bloom-560m-sdpa-lengths"):
                assert result["peak_gpu_gib"] == pytest.approx(estimated, rel=0.01), row.name
