"""The custom GPT trains as BLOOM does under every strategy, and can be saved, reloaded and asked."""

import pytest
from transformers import AutoModelForCausalLM

import custom_model  # noqa: F401  (makes the Auto classes know it)
from helpers import Finished, run
from runs import CUSTOM, GPT, uses
from test_evaluation import evaluate, few

TOLERANCE = 1e-4


@uses(*CUSTOM)
def test_every_strategy_has_the_losses_of_the_plain_trainer(run: Finished, table):
    expected = table("gpt_plain").losses
    assert expected[0] - expected[1] > 0.05, "the loss hardly moves, so that equal losses prove nothing"
    assert run.losses == pytest.approx(expected, abs=TOLERANCE, rel=0), run
    assert run.record["settings"]["num_layers"] == 2


@uses(*CUSTOM)
def test_saved_model_is_whole(run: Finished):
    model, info = AutoModelForCausalLM.from_pretrained(run.output, output_loading_info=True)
    assert not any(info.values()), info
    assert type(model).__name__ == "CustomGPTForCausalLM"
    assert sum(p.numel() for p in model.parameters()) == run.record["parameters"]


@uses("gpt_full_shard")
def test_fsdp_wraps_its_blocks(run: Finished):
    assert run.effective("FSDP units") == "2 blocks"
    assert run.effective("local parameter share") == 0.5


def test_16_questions_are_learned_by_heart_and_answered_by_the_saved_model(workplace):
    settings = few(workplace, 16) | GPT | {"NUM_EPOCHS": 80, "BATCH_SIZE": 2, "GRAD_ACC": 1}
    trained = run(workplace, "gpt_overfitted", "--labels", "answer", "--eval_strategy", "no", **settings)
    assert (trained.record["exact_match"], trained.record["f1"]) == (100, 100)
    sixteen = {name: value for name, value in few(workplace, 16).items() if name != "TRAIN_SIZE"}
    assert evaluate(workplace, trained, "gpt evaluated", **sixteen) == {"exact_match": 100, "f1": 100}
