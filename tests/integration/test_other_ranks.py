"""Tests of runs that resume on another number of ranks, or in another layout of FSDP2.

The global batch remains the same, so each step has the same questions. Only the order of additions changes.
`make test` tries one change of each kind, and `make test-faults` the others.
"""

import json
from dataclasses import dataclass

import pytest
import torch
from safetensors.torch import load_file

from helpers import REPOSITORY, Finished
from runs import BF16, FP16_ON_CPU, RUNS, Run, deepspeed, fsdp
from settings.precision import cpu_has_bf16

SAVED_STEP = 6  # in the middle of the second epoch, which has 4 steps
FLAGS = ("--save_strategy", "steps", "--save_steps", SAVED_STEP, "--save_total_limit", 9, "--logging_steps", 1)
# The largest relative difference of a loss and of the weights. docs/reliability.md promises the first number
TOLERANCES = {"fp32": (1e-6, 1e-6), "bf16": (4e-4, 2e-3), "fp16": (1e-5, 1e-3)}
OWN_CONFIGS = {
    "no_wrap": {"auto_wrap_policy": "NO_WRAP"},
    "sharded": {"state_dict_type": "SHARDED_STATE_DICT"},
}
LAYOUTS = {
    "ddp": Run(),
    "bare": Run(arguments=("--fsdp",)),
    **{name: Run(arguments=("--fsdp", "--fsdp_config", f"{name}.json")) for name in OWN_CONFIGS},
    **{name: fsdp(name) for name in ("full_shard", "shard_grad_op", "hybrid_shard_2x2")},
    "checkpointing": fsdp("full_shard_activation_checkpointing"),
    **{name: deepspeed(name) for name in ("zero0", "zero2")},
    "lora_full_shard": RUNS["lora_full_shard"],
}


@dataclass(frozen=True)
class Change:
    """A checkpoint that one layout saves on some ranks, and the layout and ranks that resume from it."""

    saved: str
    ranks: int
    resumed: str
    new_ranks: int
    precision: str = "fp32"
    exact: bool = False

    def __str__(self) -> str:
        return f"{self.precision} {self.saved} {self.ranks} to {self.resumed} {self.new_ranks}"


CHANGES = [
    Change("ddp", 2, "ddp", 1),
    Change("full_shard", 2, "full_shard", 1),
    Change("full_shard", 2, "shard_grad_op", 2, exact=True),
    Change("sharded", 2, "sharded", 1),
    Change("zero0", 2, "zero0", 1),
    Change("full_shard", 2, "full_shard", 1, "bf16"),
    Change("lora_full_shard", 2, "lora_full_shard", 1),
]
MORE = [
    Change("ddp", 2, "ddp", 4),
    Change("full_shard", 2, "full_shard", 4),
    Change("full_shard", 4, "full_shard", 2),
    Change("full_shard", 1, "full_shard", 2),
    Change("full_shard", 2, "hybrid_shard_2x2", 4),
    Change("full_shard", 2, "checkpointing", 2, exact=True),
    Change("full_shard", 2, "bare", 2, exact=True),
    Change("full_shard", 2, "no_wrap", 2),
    Change("sharded", 2, "sharded", 4),
    Change("zero0", 2, "zero0", 4),
]
MORE += [
    Change(saved, 2, resumed, ranks, precision)
    for saved, resumed, ranks in (
        ("ddp", "ddp", 1),
        ("full_shard", "full_shard", 1),
        ("full_shard", "full_shard", 4),
        ("full_shard", "shard_grad_op", 2),
        ("full_shard", "hybrid_shard_2x2", 4),
        ("sharded", "sharded", 1),
        ("zero0", "zero0", 1),
        ("zero0", "zero0", 4),
    )
    for precision in ("bf16", "fp16")
]
MORE = [change for change in MORE if change not in CHANGES]


@pytest.fixture(scope="module")
def start(train, table, workplace):
    """``start(name, layout, ranks, precision, *flags, **options)`` runs a layout with 8 questions in each step."""
    full_shard = json.loads((REPOSITORY / "fsdp_configs" / "full_shard.json").read_text())
    for name, keys in OWN_CONFIGS.items():
        (workplace / f"{name}.json").write_text(json.dumps(full_shard | keys))

    def run(name: str, layout: str, ranks: int, precision: str, *flags: object, **options: object) -> Finished:
        row = LAYOUTS[layout]
        if row.base:
            table(row.base)
        how = row.settings | {"ranks": ranks, "BATCH_SIZE": 4 // ranks}
        if precision == "fp16":
            how["script"] = FP16_ON_CPU
        if precision == "bf16":
            how |= BF16
        return train(name, *row.arguments, *FLAGS, *flags, **how | options)

    return run


@pytest.fixture(scope="module")
def undisturbed(start):
    done: dict[tuple, Finished] = {}

    def run(layout: str, ranks: int, precision: str) -> Finished:
        key = layout, ranks, precision
        if key not in done:
            done[key] = start(f"whole_{layout}_{ranks}_{precision}", *key)
        return done[key]

    return run


def weights_differ_by(run: Finished, expected: Finished) -> float:
    """Norm of the difference of all weights, relative to the norm of the weights.

    FSDP on several ranks saves a tied head a second time, under a name of its own.
    """
    ours, theirs = (load_file(each.output / "model.safetensors") for each in (run, expected))
    names = sorted(ours.keys() & theirs.keys())
    a, b = (torch.cat([weights[name].flatten().double() for name in names]) for weights in (ours, theirs))
    return ((a - b).norm() / b.norm()).item()


@pytest.mark.promise("other ranks, and other layouts of FSDP2: what agrees, and what is refused")
@pytest.mark.parametrize(
    "change", [*CHANGES, *(pytest.param(each, marks=pytest.mark.faults) for each in MORE)], ids=str
)
def test_a_run_resumes_on_other_ranks_within_rounding(change: Change, start, undisturbed):
    if change.precision == "bf16" and not cpu_has_bf16():
        pytest.skip("this CPU has no bf16 instructions")
    whole = undisturbed(change.saved, change.ranks, change.precision)
    name = str(change).replace(" ", "_")
    checkpoint = whole.output / f"checkpoint-{SAVED_STEP}"
    resume = ("--resume_from_checkpoint", checkpoint)
    resumed = start(name, change.resumed, change.new_ranks, change.precision, *resume)
    assert resumed.record["resumed_from"].endswith(f"checkpoint-{SAVED_STEP}")
    assert resumed.record["world_size"] == change.new_ranks
    note = f"resuming on {change.new_ranks} rank(s), the checkpoint is of {change.ranks}: sums are rounded in another"
    assert (note in resumed.out) == (change.new_ranks != change.ranks)
    assert resumed.effective("global batch") == 8
    assert resumed.record["train"]["real_tokens"] == whole.record["train"]["real_tokens"], "the questions differ"
    of_losses, of_weights = (0, 0) if change.exact else TOLERANCES[change.precision]
    assert resumed.step_losses == pytest.approx(whole.step_losses, rel=of_losses, abs=0)
    assert resumed.losses == pytest.approx(whole.losses, rel=of_losses, abs=0)
    assert weights_differ_by(resumed, whole) <= of_weights
    if change.resumed == "sharded":  # transformers' own Trainer cannot save a complete model then
        assert list(checkpoint.glob("pytorch_model_fsdp_0/*.distcp")), "one file per rank"
        assert (resumed.output / "model.safetensors").stat().st_size > 4 * resumed.record["parameters"]


@pytest.mark.promise("other ranks, and other layouts of FSDP2: what agrees, and what is refused")
@pytest.mark.parametrize(
    ("saved", "resumed", "ranks", "options", "message"),
    [
        ("zero2", "zero2", 1, {}, "ranks was 2, is 1; a ZeRO-2 checkpoint has one part for each rank; start 2 ranks"),
        ("zero0", "ddp", 2, {}, "strategy was DeepSpeed ZeRO-0, is plain or DDP"),
        ("full_shard", "ddp", 1, {}, "strategy was FSDP2, is plain or DDP"),
        ("full_shard", "zero0", 2, {}, "strategy was FSDP2, is DeepSpeed ZeRO-0"),
        ("ddp", "full_shard", 2, {}, "strategy was plain or DDP, is FSDP2"),
        ("full_shard", "sharded", 2, {}, "config state_dict_type was FULL_STATE_DICT, is SHARDED_STATE_DICT"),
        ("full_shard", "full_shard", 1, {"BATCH_SIZE": 2}, "global_batch was 8, is 4; set GRAD_ACC=4, which gives"),
        ("full_shard", "full_shard", 1, {"BATCH_SIZE": 3}, "global_batch was 8, is 6; no GRAD_ACC gives the same"),
    ],
)  # fmt: skip
def test_other_changes_end_with_one_line(saved, resumed, ranks, options, message, start, undisturbed):
    whole = undisturbed(saved, 2, "fp32")
    resume = ("--resume_from_checkpoint", whole.output / f"checkpoint-{SAVED_STEP}")
    refused = start(f"refused_{saved}_{resumed}_{len(message)}", resumed, ranks, "fp32", *resume, code=4, **options)
    assert message in refused.error
    assert not refused.record_path.exists()
