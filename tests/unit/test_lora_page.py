"""The numbers of docs/lora.md and of its solution follow from the shapes of the models and from the page's formulas."""

import inspect
import re

import pytest
from torch import nn

from config import ModelArguments
from estimate.command_line import parse_memory_plan, parse_plan
from estimate.communication import sent_bytes
from estimate.memory import estimate_parts, parts_at_peak
from estimate.model_shape import trace_shape
from helpers import REPOSITORY, program
from model import build_meta_model
from models import lora
from models.lora import LoraLinear, add_adapters, count_adapter_elements
from shared.units import GB, GIB

PAGE = (REPOSITORY / "docs" / "lora.md").read_text(encoding="utf-8")
SOLUTION = (REPOSITORY / "exercises" / "solution" / "lora.md").read_text(encoding="utf-8")
TEXT, SOLUTION_TEXT = " ".join(PAGE.split()), " ".join(SOLUTION.split())
METHODS = ("DDP", "ZeRO-1", "ZeRO-2", "ZeRO-3", "FSDP")
MIB = 2**20


@pytest.fixture(scope="module")
def figure():
    """The module that computes the tables and draws the figure."""
    return program("docs/figures/adapters.py")


def adapted(name: str, rank: int = 8) -> nn.Module:
    model = build_meta_model(ModelArguments(model_name=name))
    add_adapters(model, rank)
    return model


def count(name: str, rank: int = 8) -> tuple[int, int]:
    """Count the frozen and the trained elements of a real model with adapters."""
    parameters = list(adapted(name, rank).parameters())
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    return sum(p.numel() for p in parameters) - trained, trained


def rows(text: str, columns: int, first: str) -> list[list[str]]:
    """Return the cells of the rows, without the header, of the table whose header begins with `first`."""
    table = next(
        part
        for part in text.split("\n\n")
        if part.startswith(f"| {first}") and part.count("|", 0, part.find("\n")) == columns + 1
    )
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()[2:]]


# What is trained


def test_the_page_shows_the_code_of_lora():
    code = PAGE.split("```python\n")[1].split("```")[0]
    source = inspect.getsource(lora)
    lines = [re.sub(r"  # .*", "", line).strip() for line in code.splitlines()]
    changed = {  # without types, dtypes and devices
        "def forward(self, x):": "def forward(self, x: torch.Tensor) -> torch.Tensor:",
        "layer.lora_a = nn.Parameter(a)": "layer.lora_a = nn.Parameter(a.to(layer.weight.device, dtype))",
        "layer.lora_b = nn.Parameter(torch.zeros(layer.out_features, rank))": (
            "layer.lora_b = nn.Parameter("
            "torch.zeros(layer.out_features, rank, dtype=dtype, device=layer.weight.device))"
        ),
    }
    for line in filter(None, lines):
        assert changed.get(line, line) in source, line
    assert lora.SCALE == 2 and "y = W x + 2 B A x" in PAGE


def test_the_table_of_layers_shows_the_shapes_of_bloom_7b1():
    model = adapted("bigscience/bloom-7b1")
    block = [layer for layer in model.transformer.h[0].modules() if isinstance(layer, LoraLinear)]
    shown = rows(PAGE, 5, "Layer of a block")
    assert len(block) == len(shown) - 1 == 4
    for layer, (_, *cells) in zip(block, shown, strict=False):
        sizes = (
            layer.in_features,
            layer.out_features,
            layer.weight.numel(),
            layer.lora_a.numel() + layer.lora_b.numel(),
        )
        assert cells == [f"{size:,}" for size in sizes]
    layers = [layer for layer in model.modules() if isinstance(layer, LoraLinear)]
    frozen, trained = count("bigscience/bloom-7b1")
    assert trained == count_adapter_elements(model, 8)
    assert shown[-1] == ["all 30 blocks", "", "", f"{sum(each.weight.numel() for each in layers):,}", f"{trained:,}"]
    assert (
        f"trains {trained:,} parameters next to {frozen:,} frozen ones: {trained / frozen:.2%}".replace("%", " %")
        in TEXT
    )


def test_the_module_of_the_figure_knows_the_sizes(figure):
    shape = figure.bloom_7b1()
    frozen, trained = count("bigscience/bloom-7b1")
    assert (shape.parameters, figure.adapter_elements(shape.hidden, shape.layers)) == (frozen, trained)
    assert figure.adapter_elements(1024, 24) == count("bigscience/bloom-560m")[1]
    assert figure.adapter_elements(64, 2) == count("tiny-bloom")[1]


# What a rank holds


def test_the_bytes_of_a_parameter_follow_from_the_formulas_of_their_row(figure):
    shown = rows(PAGE, 5, "Method")
    assert [row[0] for row in shown] == list(METHODS) == list(figure.TRAINED)
    for method, formula, trained, frozen_formula, frozen in shown:
        for text, result in ((formula, trained), (frozen_formula, frozen)):
            assert eval(text, {"N": 4}) == float(result), (method, text)
        assert sum(figure.trained_bytes(method).values()) == float(trained)
        assert figure.frozen_bytes(method) == float(frozen)


def test_the_fixed_table_follows_from_the_bytes_and_the_shapes(figure):
    frozen, trained = count("bigscience/bloom-7b1")
    bytes_of = {row[0]: (float(row[2]), float(row[4])) for row in rows(PAGE, 5, "Method")}
    for method, *cells in rows(PAGE, 5, "|"):
        of_trained, of_frozen = bytes_of[method]
        parts = (
            of_trained * frozen,
            of_frozen * frozen,
            of_trained * trained,
            of_frozen * frozen + of_trained * trained,
        )
        assert [cell.strip("*") for cell in cells] == [f"{part / GIB:.2f}" for part in parts], method
    assert figure.held_table() in PAGE
    assert f"20 x {frozen:,} = {20 * frozen / GIB:.2f} GiB" in TEXT
    assert f"2 x {frozen:,} + 20 x {trained:,} = {(2 * frozen + 20 * trained) / GIB:.2f} GiB" in TEXT


def test_sentences_about_memory_follow_from_the_table():
    full, lora_sum = ({row[0]: float(row[column].strip("*")) for row in rows(PAGE, 5, "|")} for column in (1, 4))
    saved, saved_with_lora = (
        {method: f"{table['DDP'] - table[method]:.2f}" for method in METHODS} for table in (full, lora_sum)
    )
    frozen, trained = count("bigscience/bloom-7b1")
    matrices = 6_039_797_760
    for sentence in (
        f"they save {saved['ZeRO-1']} and {saved['ZeRO-2']} GiB against DDP",
        f"they save {saved_with_lora['ZeRO-1']} and {saved_with_lora['ZeRO-2']} GiB, and DDP is simpler",
        f"so they save {saved_with_lora['ZeRO-3']} GiB",
        f"makes the {2 * frozen / GIB:.2f} GiB smaller",
        f"on 4 GPUs it saves {saved_with_lora['ZeRO-2']} GiB",
        f"DDP needs {(4 * frozen + 20 * trained) / GIB:.1f} GiB where this page says {lora_sum['DDP']:.2f}",
        f"fall from {2 * matrices / GIB:.2f} to {4.127 / 8 * matrices / GIB:.2f} GiB",
        f"adapters have {8 * trained / GIB:.2f} GiB",
        f"takes {2 * (frozen + trained) / GB:.0f} GB with DDP",
    ):
        assert sentence in TEXT, sentence
    # Parameters of at most 10 x hidden size stay whole on each rank
    small = sum(
        p.numel() for p in adapted("bigscience/bloom-7b1").parameters() if p.requires_grad and p.numel() <= 40960
    )
    assert 0 < 2 * small / GIB < 0.03 and "adds less than 0.03 GiB" in TEXT


# What the estimate prints


def test_the_page_shows_what_the_estimate_prints():
    model = ["--model_name", "bigscience/bloom-7b1", "--bf16", "--gpus", "4"]
    zero3 = ["--deepspeed", str(REPOSITORY / "ds_configs/zero3.json")]
    shown = {row[0]: row[1:] for row in rows(PAGE, 4, "| DDP, full")}
    for column, flags in enumerate(([], ["--lora_rank", "8"], [*zero3, "--lora_rank", "8"])):
        parts = parts_at_peak(estimate_parts(parse_memory_plan([*model, *flags], environment={})))
        expected = {part.name: f"{part.gpu / GIB:.2f}" for part in parts if part.gpu}
        expected["one GPU"] = f"{sum(part.gpu for part in parts) / GIB:.1f}"
        assert {name: cells[column] for name, cells in shown.items() if cells[column]} == expected, flags
    (activations,) = (
        part.gpu
        for part in parts_at_peak(estimate_parts(parse_memory_plan([*model, *zero3], environment={})))
        if part.name == "activations"
    )
    with_lora = shown["activations"][2]
    assert f"full fine-tuning needs {activations / GIB:.2f} GiB for activations" in TEXT
    assert f"and LoRA {with_lora}." in TEXT


# What a rank sends


def test_the_table_of_bytes_sent(figure):
    with_lora = figure.sent_with_lora()
    for method, full, lora_gb, _ in rows(PAGE, 4, "GB per step"):
        flags = ["--model_name", "bigscience/bloom-7b1", "--bf16", "--gpus", "4"]
        if stage := re.fullmatch(r"ZeRO-(\d)", method):
            flags += ["--deepspeed", str(REPOSITORY / f"ds_configs/zero{stage[1]}.json")]
        if method.startswith("FSDP"):
            flags += ["--fsdp"]
        settings = parse_plan(flags, environment={})
        assert full == f"{sent_bytes(trace_shape(settings), settings) / GB:.1f}"
        sent = with_lora[method] / GB
        assert lora_gb == (f"{sent:.2f}" if sent < 1 else f"{sent:.0f}"), method
        if method == "DDP":
            assert f"DDP sends {round(float(full) / sent, -1):.0f} times less" in TEXT
            assert f"DDP sends {sent:.2f} GB per step and FSDP {with_lora['FSDP FULL_SHARD'] / GB:.0f} GB" in TEXT
        if method.startswith("FSDP"):
            assert f"only {1 - sent / float(full):.0%} less".replace("%", " %") in TEXT


# What laptop runs held, and the solution


def held(frozen: int, trained: int, gpus: int = 2) -> dict[str, tuple[float, float, float]]:
    """Return the bytes of parameters, gradients and optimizer state in a run of the experiments, which accumulate."""
    return {
        "lora/ddp": (2 * frozen + 4 * trained, 4 * trained, 8 * trained),
        "lora/zero1": (2 * (frozen + trained), 2 * trained, 12 * trained / gpus),
        "lora/zero3": (2 * (frozen + trained) / gpus, 2 * trained / gpus, 12 * trained / gpus),
        "lora/fsdp": ((2 * frozen + 4 * trained) / gpus, 2 * trained, 8 * trained / gpus),
        "lora/zero1_full": (2 * frozen, 2 * frozen, 12 * frozen / gpus),
    }


def test_the_laptop_runs_held_what_the_formulas_say():
    frozen, trained = count("tiny-bloom")
    assert f"{frozen:,} frozen + {trained:,} trained" in TEXT and f"{frozen + trained:,}" in PAGE
    tensors = sum(p.requires_grad for p in adapted("tiny-bloom").parameters())
    steps = {"lora/ddp": 4 * tensors, "lora/fsdp": 4 * tensors}  # bytes of Adam's counters
    shown = rows(PAGE, 5, "Run | Parameters")
    assert len(shown) == 5
    for run, *cells, _ in shown:
        parameters, gradients, optimizer = held(frozen, trained)[run.strip("`")]
        sizes = (parameters, gradients, optimizer + steps.get(run.strip("`"), 4))
        assert cells == [f"{size:,.0f}" for size in sizes], run


def test_the_solution_shows_the_sizes_of_bloom_560m():
    frozen, trained = count("bigscience/bloom-560m")
    for text in (TEXT, SOLUTION_TEXT):
        assert f"{frozen:,}" in text and f"{trained:,}" in text
    shown = rows(SOLUTION, 5, "Run")
    assert len(shown) == 5
    for run, *cells, _ in shown:
        assert cells == [f"{size / MIB:,.1f}" for size in held(frozen, trained)[run.strip("`")]], run
    assert f"another 4 t = {4 * trained / MIB:.1f} MiB" in SOLUTION_TEXT


def savings_against_ddp(figure, rank: int) -> dict[str, float]:
    """Return the bytes that each other method saves with LoRA of this rank."""
    frozen, trained = count("bigscience/bloom-7b1", rank)
    held = {m: figure.frozen_bytes(m) * frozen + sum(figure.trained_bytes(m).values()) * trained for m in METHODS}
    return {method: held["DDP"] - held[method] for method in METHODS[1:]}


def test_the_solution_shows_rank_64_and_the_rank_at_which_both_parts_are_equal(figure):
    frozen, trained = count("bigscience/bloom-7b1", rank=64)
    assert f"eight times as many elements: {trained:,}" in SOLUTION_TEXT
    for method, _full, *cells in rows(figure.held_table(64), 5, "|"):
        assert f"| {method} | {' | '.join(cells)} |" in SOLUTION, method
    before, after = savings_against_ddp(figure, rank=8), savings_against_ddp(figure, rank=64)
    growth = {method: after[method] - before[method] for method in after}
    assert sorted(growth, key=growth.__getitem__)[-2:] == ["ZeRO-3", "FSDP"]
    assert f"grows most, from {before['FSDP'] / GIB:.2f} to {after['FSDP'] / GIB:.2f}" in SOLUTION_TEXT
    eightfold = [method for method in after if after[method] == pytest.approx(8 * before[method])]
    assert eightfold == ["ZeRO-1", "ZeRO-2"] and max(after[m] / before[m] for m in after) == pytest.approx(8)
    assert f"{after['ZeRO-1'] / GIB:.2f} and {after['ZeRO-2'] / GIB:.2f} GiB." in SOLUTION_TEXT
    per_rank = trained // 64
    assert f"adds {per_rank:,} elements" in SOLUTION_TEXT
    assert f"gives rank {2 * frozen / (20 * per_rank):.1f}" in SOLUTION_TEXT
