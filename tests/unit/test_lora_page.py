"""docs/figures/adapters.py, which computes tables and the figure of docs/lora.md, agrees with the estimate."""

import pytest

from estimate.command_line import parse_memory_plan
from estimate.memory import estimate_parts
from helpers import REPOSITORY, program
from shared.units import GIB

FLAGS = {
    "DDP": [],
    **{f"ZeRO-{stage}": ["--deepspeed", f"{REPOSITORY}/ds_configs/zero{stage}.json"] for stage in (1, 2, 3)},
    "FSDP": ["--fsdp"],
}


@pytest.mark.parametrize("method", FLAGS)
def test_what_a_rank_holds_with_lora_is_what_the_estimate_says(method):
    figure = program("docs/figures/adapters.py")
    words = ["--model_name", "bigscience/bloom-560m", "--bf16", "--gpus", "4", "--lora_rank", "8", *FLAGS[method]]
    parts = {part.name: part.gpu / GIB for part in estimate_parts(parse_memory_plan(words, environment={}))}
    held = figure.held(method, frozen=559_214_592, trained=figure.adapter_elements(hidden=1024, blocks=24))
    # The figure divides FSDP's gradients over the ranks; while micro batches are added up, FSDP does not
    assert held == pytest.approx({name: parts[name] for name in held}, abs=0.005), method
