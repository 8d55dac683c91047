"""The pages show measured and computed numbers correctly, and only flags that the commands accept.

tests/text_checks compares everything else on the pages with the files that they describe.
"""

import itertools
import re
import shlex
from collections.abc import Iterator

import pytest
import torch
from transformers.loss.loss_utils import ForCausalLMLoss

from estimate.command_line import parse_memory_plan
from estimate.compare import ORDER_TO_TRY
from estimate_memory import memory_table
from helpers import REPOSITORY, program
from settings.command_line import parse_command_line
from shared.errors import WorkshopError
from shared.json_files import read_json
from text_checks.commands import Command, commands
from text_checks.common import relative_name


def page(name: str) -> str:
    return (REPOSITORY / "docs" / name).read_text(encoding="utf-8")


def flag_errors(command: Command) -> Iterator[str]:
    """Check the flags of a command that trains, evaluates or estimates. Yield the error if there is one."""
    script, *flags = command.without_launcher[1:] or [""]
    try:
        if script.endswith("estimate_memory.py"):
            parse_memory_plan(flags, environment=command.variables)
        elif script.endswith(("train.py", "loop.py", "evaluate.py")):
            parse_command_line("", flags, gpu=True, environment=command.variables)
    except WorkshopError as error:
        yield f"{relative_name(command.page)}: `{shlex.join(command.words)}`: {error}"


@pytest.mark.promise("commands work as printed")
def test_each_command_of_a_page_has_flags_that_its_script_accepts(in_the_repository):
    found = [line for command in commands() for line in flag_errors(command)]
    assert not found, "\n".join(found)


def test_the_page_tries_the_methods_in_the_order_of_the_code():
    text = page("comparison.md")
    (steps,) = re.findall(r"^## The order in which to try\n(.*?)\n## ", text, re.MULTILINE | re.DOTALL)
    offload = [config for config in ORDER_TO_TRY if "offload" in config]
    places: list[int] = []
    for step in re.findall(r"^\d\. \**([^:*\n]+)", steps, re.MULTILINE):
        methods = re.findall(r"DDP|ZeRO-\d|[A-Z]+_[A-Z_]+", step)
        configs = [method if method == "DDP" else method.lower().replace("-", "") for method in methods]
        configs += offload if step == "Offload" else []
        places += sorted(map(ORDER_TO_TRY.index, configs))
    assert places == sorted(places) and len(places) == 6 + len(offload)


def test_the_numbers_of_what_fits_where_have_the_order_of_the_code():
    compute = program("docs/what_fits/compute.py")
    numbers = read_json(compute.NUMBERS, "run compute.py")
    assert numbers["order_to_try"] == list(ORDER_TO_TRY)
    assert numbers["methods"] == compute.methods() and numbers["groups"] == compute.GROUPS
    configs = [path.stem for path in REPOSITORY.glob("*_configs/*.json")]
    for group in [configs, *numbers["groups"].values()]:
        assert {*group} <= {*ORDER_TO_TRY}, "add the config to ORDER_TO_TRY of scripts/estimate/compare.py"
    for group in numbers["groups"].values():
        assert list(group) == sorted(group, key=ORDER_TO_TRY.index)


def test_the_example_of_the_estimate_is_the_output_of_its_command(in_the_repository):
    flags = "--model_name bigscience/bloom-3b --deepspeed ds_configs/zero3.json --gpus 4 --gpu_memory 32"
    printed = memory_table(parse_memory_plan(flags.split(), environment={})).splitlines()
    machine_lines = ("Python, libraries", "one node:", "for sbatch:")
    shown = page("memory.md")
    assert [line for line in printed if line not in shown and not line.startswith(machine_lines)] == []


def test_bytes_of_the_dimensions_agree_with_papers_and_counts():
    numbers = program("docs/figures/dimensions.py")
    shape = numbers.trace_shape(numbers.plan())
    layers, b, s, h, t = 30, 1, 512, 4096, 8  # bloom-7b1, with the symbols of arXiv:2104.04473

    # Section 3 of the paper counts numbers, which have 2 bytes here. Tensor parallelism sends 8 b s h (t - 1) / t
    # numbers per block, in 4 all-reduces. Embedding and head have one all-reduce each. A pipeline stage sends b s h
    # numbers in each direction.
    block_bytes = 8 * b * s * h * (t - 1) / t * 2
    assert numbers.tensor_sends(shape) == pytest.approx((layers + 2 / 4) * block_bytes)
    assert numbers.pipeline_sends(shape) == 2 * b * s * h * 2

    # The benchmark counted the collectives of transformers' plan with 8 blocks, 64 tokens, hidden size 256 and 12,288
    # logits. Two of the fp32 all-reduces are outside the blocks. With FSDP, all fp32 all-reduces carry activations.
    rows = program("benchmarks/communication.py").read_results()["rows"]
    row = next(row for row in rows if (row["strategy"], row["accumulation"]) == ("TP 2 x FSDP 2", 1))
    counted = {(kind, dtype): (number, size) for kind, dtype, _, number, size in row["collectives"]}
    number, size = counted["all-reduce", "float32"]
    fp32 = size / number / (64 * 256) * ((number - 2) / 8 * layers + 2)
    number, size = counted["all-reduce", "bfloat16"]
    bf16 = size / number / (64 * 256) * number / 8 * layers
    logits = counted["all-gather", "bfloat16"][1] / (64 * 12_288) * 250_880
    assert numbers.tensor_sends_by_plan() == pytest.approx((2 * s * h * (fp32 + bf16) + s * logits) * (t - 1) / t)

    # For a micro batch of T tokens, FULL_SHARD gathers 7.069 billion parameters in the forward pass and the 6.041
    # billion of the blocks in the backward pass, and it reduces 7.069 billion gradients. Each has 2 bytes. Tensor
    # parallelism computes 8 T tokens. Each token has 4 x 30 + 2 all-reduces, and a ring sends 2 x 4,096 numbers of 2
    # bytes in each.
    tokens = 2 * (7.069e9 + 6.0414e9 + 7.069e9) / (8 * 122 * 2 * 2 * 4096)
    assert numbers.break_even(1, numbers.tensor_sends(shape)) == pytest.approx(tokens, rel=1e-4)

    # The keys and values of 131,072 tokens have 2.147 GB per block, and a rank sends 7 of 8 pieces. The ring sends
    # them in the forward pass, in its recomputation, and in the backward pass. It sends their gradients 8 times.
    assert numbers.context_sends(shape, 131_072, again=True) / 1e9 == pytest.approx(30 * 2.1475 * 29 / 8, rel=1e-4)
    assert numbers.context_sends(shape, 131_072) / 1e9 == pytest.approx(30 * 2.1475 * 22 / 8, rel=1e-4)
    # Ulysses sends 7 of 8 parts of four such tensors of a rank's own tokens, each half as large as keys and values.
    assert numbers.ulysses_sends(shape, 131_072) / 1e9 == pytest.approx(30 * 3 * 2 * 2.1475 / 8 * 7 / 8, rel=1e-4)


def test_bytes_of_full_logits_agree_with_a_real_loss():
    tokens, vocabulary, hidden = 256, 4096, 8
    states = torch.randn(1, tokens, hidden, dtype=torch.bfloat16, requires_grad=True)
    head = torch.randn(vocabulary, hidden, dtype=torch.bfloat16, requires_grad=True)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        ForCausalLMLoss(states @ head.T, torch.zeros(1, tokens, dtype=torch.long), vocabulary).backward()
    memory = [event for event in profile.profiler.kineto_results.events() if event.name() == "[memory]"]
    sizes = [event.nbytes() for event in sorted(memory, key=lambda event: event.start_ns())]
    peak = max(itertools.accumulate(sizes))
    assert peak / (tokens * vocabulary) == pytest.approx(program("docs/figures/dimensions.py").LOGITS, rel=0.02)
