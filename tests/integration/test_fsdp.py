"""FSDP on the CPU: real shards over gloo, the losses of the plain Trainer, and a run that does not shard is caught.

The runs of the table `FSDP` go through every test of test_strategies.py as well: losses, saved models.
"""

import json
import re

import pytest

from helpers import REPOSITORY, Finished, patched, run
from runs import FSDP, uses
from test_evaluation import evaluate
from test_resume import KILLED, checkpoints

NAMES = {
    "full_shard": "FSDP2 FULL_SHARD",
    "full_shard_activation_checkpointing": "FSDP2 FULL_SHARD",
    "shard_grad_op": "FSDP2 SHARD_GRAD_OP",
    "hybrid_shard": "FSDP2 FULL_SHARD",  # one node: nothing to replicate
    "hybrid_shard_2x2": "FSDP2 HYBRID_SHARD",
}
TOLERANCE = 1e-4
BF16_TOLERANCE = 2e-4


@uses(*FSDP)
def test_audit_shows_the_strategy_its_units_and_the_share_of_each_rank(run: Finished):
    config, processes = run.job_id.rsplit("-", 1)
    replicas = 2 if config == "hybrid_shard_2x2" else 1
    shards = int(processes) // replicas
    expected = {
        "strategy": NAMES[config],
        "FSDP units": "2 blocks",
        "local parameter share": round(1 / shards, 4),
        "mesh": f"{replicas} x {shards}",
        "CPU offload": False,
        "checkpointed blocks": 2 if "checkpointing" in config else 0,
        "checkpoint format": "FULL_STATE_DICT",
        "world size": int(processes),
    }
    assert {knob: run.effective(knob) for knob in expected} == expected
    # what accelerate wraps besides the blocks
    assert "and BloomForCausalLM, Embedding, LayerNorm, Linear\n" in run.log


PRINT_LOSSES = """
from training import trainer
original = trainer.WorkshopTrainer.compute_loss
def compute_loss(self, *arguments, **options):
    loss = original(self, *arguments, **options)
    print(f"loss of a batch: {(loss[0] if isinstance(loss, tuple) else loss).dtype}.\\n", end="", flush=True)
    return loss
trainer.WorkshopTrainer.compute_loss = compute_loss
"""


def test_the_loss_stays_in_fp32_when_fsdp_computes_in_16_bit(workplace, table):
    """FSDP rounds a loss of 7.62 to 7.625 in bf16, and the number of tokens that it is divided by to three digits."""
    wanted = table("bf16_ddp-2")
    script, flags = patched(workplace, "print_losses", PRINT_LOSSES), FSDP["full_shard-2"].arguments
    found = run(workplace, "bf16_loss", *flags, script=script, processes=2, BATCH_SIZE=2, FP16="", BF16="True")
    assert found.effective("precision") == wanted.effective("precision") == "bf16"
    dtypes = set(re.findall(r"loss of a batch: (torch\.\w+)\.", found.log))
    assert dtypes == {"torch.float32"}
    assert found.losses == pytest.approx(wanted.losses, rel=BF16_TOLERANCE)
    assert found.record["train"]["loss_mean"] == pytest.approx(wanted.record["train"]["loss_mean"], rel=BF16_TOLERANCE)


BROKEN = {
    "accelerate runs DDP on the CPU": (
        "from parallel import fsdp_config\nfsdp_config.shard_on_cpu = lambda: None",
        "error: knob audit: strategy: FSDP2 FULL_SHARD was requested, DDP is what would run;",
    ),
    "the blocks are not wrapped": (
        "import accelerate.utils.fsdp_utils as fsdp\nfsdp.fsdp2_prepare_auto_wrap_policy = lambda *arguments: None",
        "error: knob audit: FSDP units: 2 blocks was requested, 0 blocks is what would run;",
    ),
    "a rank holds everything": (
        "from parallel import sharding\nsharding.local_share = lambda model: 0.8",
        "error: knob audit: local parameter share: 1.0 was requested, 0.8 is what would run;",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_fsdp_that_did_not_take_effect_ends_the_run(workplace, name: str):
    patch, error = BROKEN[name]
    broken = run(workplace, name, "--fsdp", script=patched(workplace, name.replace(" ", "_"), patch), code=3)
    assert len(broken.error_lines) == 1, broken
    assert broken.error_lines[0].startswith(error)
    assert broken.record["status"] == "failed"
    assert broken.record["eval"] == [] if "eval" in broken.record else True


@pytest.mark.parametrize(("config", "why"), [("full_shard_cpu_offload", "cpu_offload"), ("fsdp1_full_shard", "FSDP1")])
def test_what_the_cpu_cannot_do_is_refused_with_the_reason(workplace, config: str, why: str):
    refused = run(workplace, config, "--fsdp", "--fsdp_config", f"fsdp_configs/{config}.json", code=3)
    assert len(refused.error_lines) == 1, refused
    assert why in refused.error_lines[0]
    assert "needs a GPU" in refused.error_lines[0]
    assert not refused.record_path.exists()


@pytest.fixture(scope="module")
def sharded_config(workplace) -> str:
    """Checkpoints in shards, which the Trainer alone could not turn into a model at the end."""
    content = json.loads((REPOSITORY / "fsdp_configs" / "full_shard.json").read_text())
    (workplace / "sharded.json").write_text(json.dumps(content | {"state_dict_type": "SHARDED_STATE_DICT"}))
    return "sharded.json"


def test_sharded_checkpoints_resume_and_the_model_is_whole(workplace, sharded_config: str, table):
    options = {"processes": 2, "BATCH_SIZE": 2}
    config = ("--fsdp", "--fsdp_config", sharded_config)
    script = patched(workplace, "sharded_killed", KILLED.format(before="pass"))
    dead = run(workplace, "sharded_killed", *config, script=script, code=1, **options)
    assert checkpoints(dead.output) == {"checkpoint-8": True, "checkpoint-16": False}, dead
    assert list((dead.output / "checkpoint-8").glob("pytorch_model_fsdp_0/*.distcp")), "one file per rank"
    resumed = run(workplace, "sharded_resumed", *config, "--resume_from_checkpoint", str(dead.output), **options)
    assert resumed.effective("checkpoint format") == "SHARDED_STATE_DICT"
    assert resumed.losses == pytest.approx(table("plain").losses, abs=TOLERANCE, rel=0)
    assert (resumed.output / "model.safetensors").stat().st_size > 4 * resumed.record["parameters"]


def test_full_checkpoints_resume(workplace, table):
    options = {"processes": 2, "BATCH_SIZE": 2}
    config = ("--fsdp", "--fsdp_config", "fsdp_configs/shard_grad_op.json")
    script = patched(workplace, "full_killed", KILLED.format(before="pass"))
    dead = run(workplace, "full_killed", *config, script=script, code=1, **options)
    resumed = run(workplace, "full_resumed", *config, "--resume_from_checkpoint", str(dead.output), **options)
    assert resumed.losses == pytest.approx(table("plain").losses, abs=TOLERANCE, rel=0)


def test_generation_on_two_ranks_with_an_odd_number_of_questions(workplace):
    # 7 questions: neither 2 ranks nor batches of 2 divide them
    options = {"EVAL_SIZE": 7, "EM_F1": "True", "NUM_EPOCHS": 1, "TRAIN_SIZE": 16}
    trained = run(workplace, "fsdp_scores", "--fsdp", processes=2, BATCH_SIZE=2, **options)
    scores = {name: trained.record[name] for name in ("exact_match", "f1")}
    again = evaluate(workplace, trained, "fsdp_scores_again", EVAL_SIZE=7)
    assert again == {name: round(value, 2) for name, value in scores.items()}
