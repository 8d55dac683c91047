"""A micro batch without padding has the loss and the gradients of the padded micro batch."""

import copy
from collections.abc import Iterator
from types import SimpleNamespace

import pytest
import torch
from accelerate.utils import compile_regions
from torch._dynamo.utils import counters
from transformers import (
    BloomConfig,
    BloomForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    GPTNeoXConfig,
    GPTNeoXForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    OPTConfig,
    OPTForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from config import IGNORED
from data_loader import OneRow
from guard.preconditions import check_torch_compile
from measure.flops import count_tokens
from models.bloom_sdpa import attention_name, use_attention
from models.chunked_loss import use_chunked_loss
from models.custom_model import CustomGPTConfig, CustomGPTForCausalLM
from models.lora import add_adapters
from models.padding_free import TESTED, check_padding_free, use_padding_free

SIZES = {"vocab_size": 512, "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
GPT = {"vocab_size": 512, "hidden_size": 64, "num_layers": 2, "num_heads": 4, "ff_dim": 96, "seq_length": 64}
GPT2 = {"vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4} | dict.fromkeys(
    ["resid_pdrop", "embd_pdrop", "attn_pdrop"], 0
)
LLAMA = SIZES | {"intermediate_size": 96, "num_key_value_heads": 2}
FAMILIES = {
    "bloom": (BloomForCausalLM, BloomConfig(vocab_size=512, hidden_size=64, n_layer=2, n_head=4)),
    "custom-gpt": (CustomGPTForCausalLM, CustomGPTConfig(**GPT)),
    "gpt2": (
        GPT2LMHeadModel,
        GPT2Config(**GPT2),
    ),
    "gpt_neox": (GPTNeoXForCausalLM, GPTNeoXConfig(**SIZES, intermediate_size=96, rotary_pct=0.5)),
    "llama": (LlamaForCausalLM, LlamaConfig(**LLAMA)),
    "opt": (OPTForCausalLM, OPTConfig(**SIZES, ffn_dim=96, word_embed_proj_dim=64, dropout=0)),
    "qwen2": (Qwen2ForCausalLM, Qwen2Config(**LLAMA)),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config(**LLAMA, head_dim=16)),
}
VARIANTS = ("full loss", "chunked loss", "activation checkpointing", "labels of the answer", "LoRA", "one question")
# the custom GPT cannot recompute its blocks, and GPT-2 has no layers for adapters
IMPOSSIBLE = {("custom-gpt", "activation checkpointing"), ("gpt2", "LoRA")}
CASES = sorted({(family, variant) for family in TESTED for variant in VARIANTS} - IMPOSSIBLE)


def questions(lengths=(17, 40, 5, 23), seed: int = 1) -> list[dict]:
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randint(4, 512, (length,), generator=generator).tolist() for length in lengths]
    return [{"input_ids": row, "attention_mask": [1] * len(row), "labels": list(row)} for row in rows]


def question(length: int) -> dict:
    return dict.fromkeys(("input_ids", "attention_mask", "labels"), [4] * length)


def model(family: str, variant: str = "") -> torch.nn.Module:
    kind, config = FAMILIES[family]
    torch.manual_seed(0)
    made = kind(copy.deepcopy(config)).train()
    use_attention(made, "sdpa")
    assert attention_name(made) == "sdpa"
    if variant == "LoRA":
        add_adapters(made, 4)
    if variant == "activation checkpointing":
        made.activation_checkpointing_enable({"use_reentrant": False})
    return made


def pad_rows(rows: list[dict]) -> dict:
    longest = max(len(row["input_ids"]) for row in rows)
    fill = {"input_ids": 3, "attention_mask": 0, "labels": IGNORED}
    return {name: torch.tensor([r[name] + [x] * (longest - len(r[name])) for r in rows]) for name, x in fill.items()}


def without_row_padding(batch: dict) -> dict:
    """Cut off the padding at the end of the row, as in version 2.0.0."""
    real = int((batch["rows"] >= 0).sum())
    return {name: x if name == "rows" else x[..., :real] for name, x in batch.items()}


def loss_and_gradients(made: torch.nn.Module, batch: dict) -> tuple[float, torch.Tensor]:
    made.zero_grad()
    loss = made(**batch).loss
    loss.backward()
    return loss.item(), torch.cat([p.grad.flatten() for p in made.parameters() if p.requires_grad])


@pytest.mark.parametrize(("family", "variant"), CASES)
def test_loss_and_gradients_are_those_of_the_padded_batch(family: str, variant: str):
    rows = questions([11]) if variant == "one question" else questions()
    if variant == "labels of the answer":
        for row in rows:
            row["labels"][:-4] = [IGNORED] * (len(row["labels"]) - 4)
    results = []
    for batch in (pad_rows(rows), without_row_padding(OneRow()(rows)), OneRow()(rows)):
        made = model(family, variant)
        if "rows" in batch:
            use_padding_free(made)
        if variant == "chunked loss":
            use_chunked_loss(made)
        results.append(loss_and_gradients(made, batch))
    *others, (loss, gradients) = results
    for (other_loss, other_gradients), most in zip(others, (2e-6, 1e-6), strict=True):
        assert other_loss == pytest.approx(loss, abs=1e-6)
        assert (other_gradients - gradients).norm() <= most * gradients.norm()


@pytest.mark.parametrize("family", TESTED)
def test_a_question_does_not_see_the_others(family: str):
    """The loss counts only the last question. Another first question must not change any gradient."""
    results = []
    for seed in (1, 2):
        rows = questions(seed=seed)[:2] + questions()[2:]
        for row in rows[:-1]:
            row["labels"] = [IGNORED] * len(row["labels"])
        made = model(family)
        use_padding_free(made)
        results.append(loss_and_gradients(made, OneRow()(rows)))
    assert results[0][0] == results[1][0]
    assert torch.equal(results[0][1], results[1][1])


@pytest.mark.parametrize("family", ["bloom", "llama"])
def test_the_model_still_computes_padded_batches(family: str):
    """A generation pads its questions on the left."""
    plain, other = model(family).eval(), model(family).eval()
    use_padding_free(other)
    with torch.no_grad():
        other(**OneRow()(questions()))
        batch = {name: x.flip(1) for name, x in pad_rows(questions()).items() if name != "labels"}
        answers = [each.generate(**batch, max_new_tokens=9, do_sample=False, pad_token_id=3) for each in (plain, other)]
    assert torch.equal(*answers)


def test_the_tokens_of_a_row_are_counted_as_those_of_a_padded_batch():
    """The first label of a question is the target of no position."""
    rows = questions(lengths=(7, 20, 6))
    squares = 7**2 + 20**2 + 6**2
    assert count_tokens(pad_rows(rows)).tolist() == [33, 3 * 20 - 33, 33 - 3, squares]
    assert count_tokens(OneRow()(rows)).tolist() == [33, 40 - 33, 33 - 3, squares]


def epoch(micro_batch: int) -> Iterator[dict]:
    """Batches of an epoch whose lengths are distributed as those of 1,190 questions of SQuAD."""
    lengths = (torch.randn(1190, generator=torch.Generator().manual_seed(0)) * 66 + 171).clamp(46, 512).int().tolist()
    for start in range(0, len(lengths) - micro_batch + 1, micro_batch):
        yield OneRow()([question(length) for length in lengths[start : start + micro_batch]])


def shapes(batch: dict) -> tuple[int, int]:
    return batch["labels"].numel(), batch["rows"].shape[1]


@pytest.mark.parametrize(("micro_batch", "most_rows", "most_pairs"), [(4, 9, 19), (16, 4, 9), (64, 4, 6)])
def test_few_lengths_occur(micro_batch: int, most_rows: int, most_pairs: int):
    """A GPU plans each row's length, and a compiled block each pair of this and the longest question's length."""
    batches = list(epoch(micro_batch))
    pairs = {shapes(batch) for batch in batches}
    real, padding, *_ = sum(map(count_tokens, batches)).tolist()
    assert len({row for row, _ in pairs}) <= most_rows and len(pairs) <= most_pairs
    assert real >= 0.9 * (real + padding)


@pytest.mark.parametrize(("dynamic", "most_graphs"), [(None, 8), (False, 19 + 3 * 9)])
def test_a_compiled_epoch_stays_below_the_limit_of_graphs(monkeypatch, dynamic, most_graphs: int):
    """By default a second length makes sizes symbols, so that a block has two or three graphs."""
    monkeypatch.setenv("ACCELERATE_DYNAMO_USE_REGIONAL_COMPILATION", "1")
    torch._dynamo.reset()
    counters.clear()
    made = model("bloom")
    use_padding_free(made)
    with torch._dynamo.config.patch(recompile_limit=8, fail_on_recompile_limit_hit=True):
        check_torch_compile(SimpleNamespace(torch_compile_backend="eager", torch_compile_mode=None, device="cpu"))
        compiled = compile_regions(made, backend="eager", dynamic=dynamic)
        for batch in {shapes(batch): batch for batch in epoch(4)}.values():
            compiled(**batch, use_cache=False)
    assert counters["stats"]["unique_graphs"] <= most_graphs


def test_a_row_without_room_for_padding_gets_none():
    """The attention has no free places for padding, because all questions are as long as its rows."""
    assert shapes(OneRow()([question(384)] * 3)) == (3 * 384, 384), "a multiple of 256 would be 1,280 tokens"


def test_models_that_cannot_are_refused_before_they_are_loaded(refusal):
    mistral = MistralForCausalLM(MistralConfig(**LLAMA))
    line = refusal(check_padding_free, mistral, "sdpa", True)
    models = "bloom, custom-gpt, gpt2, gpt_neox, llama, opt, qwen2, qwen3"
    assert line == f"error: --padding: none works with {models}, and this model is mistral; use --padding longest"
    line = refusal(check_padding_free, model("bloom"), "eager", True)
    assert line == "error: --padding: none needs --attention sdpa; give it, or use --padding longest"
    line = refusal(check_padding_free, model("qwen2"), "sdpa", False)
    assert line == ("error: --padding: none does not work with the sliding window of this model; use --padding longest")
