"""Exact Match and F1 of a model: it answers the evaluation questions by greedy generation."""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedTokenizerBase

from data_loader import answer_room
from distributed import watchdog
from distributed.collectives import gather_lists, print_once, rank, world_size


@dataclass(frozen=True)
class Generation:
    """The way in which the ranks answer questions.

    batch_size: questions that a rank answers at the same time. max_length: tokens of the longest training sequence.
    device: where the model computes, which is not its own `device`: FSDP's CPU offload keeps it elsewhere in between.
    sharded: the ranks hold parts of the model, so they must call its forward pass equally often.
    tensor_parallel: so many neighbouring ranks compute together, and answer the same questions.
    """

    batch_size: int
    max_length: int
    device: torch.device
    sharded: bool = False
    tensor_parallel: int = 1


def exact_match_and_f1(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Dataset, generation: Generation
) -> dict[str, float]:
    """Print and return the percent by the official SQuAD v1.1 rules, over all `questions`. Collective.

    model: of transformers, or as FSDP1 has wrapped one.
    """
    squad = load_metric()
    predictions = answer_questions(model, tokenizer, questions, generation)
    given = [{"id": str(i), "prediction_text": predictions[i]} for i in range(len(questions))]
    references: list[dict] = [
        {"id": str(i), "answers": {"text": answers, "answer_start": [0] * len(answers)}}
        for i, answers in enumerate(questions["answers"])
    ]
    scores = {name: round(float(value), 4) for name, value in squad(given, references).items()}
    print_once(f"exact_match {scores['exact_match']:.2f}  f1 {scores['f1']:.2f}")
    return scores


def load_metric() -> Callable:
    """torchmetrics' SQuAD. It brings matplotlib along, which a training without EM and F1 need not wait for."""
    from torchmetrics.functional.text import squad

    return squad


def answer_questions(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Dataset, generation: Generation
) -> dict[int, str]:
    """Number of the question -> generated answer, for all questions on every rank. Collective."""
    # Prompts of similar length in each batch, so that few are padded; the longest first, which need most memory.
    by_length = sorted(range(len(questions)), key=questions["prompt_length"][:].__getitem__, reverse=True)
    # Every group gets equally many: with sharded weights a rank without a batch would leave the others waiting.
    groups = world_size() // generation.tensor_parallel
    own_group = rank() // generation.tensor_parallel
    numbers = [*by_length, *by_length[-1:] * (-len(questions) % groups)][own_group::groups]
    answers: dict[int, str] = {}
    model.eval()
    for start in range(0, len(numbers), generation.batch_size):
        watchdog.progress(f"EM and F1, question {start} of {len(numbers)}")
        batch = numbers[start : start + generation.batch_size]
        rows = questions.select(batch)
        prompts = [ids[:n] for ids, n in zip(rows["input_ids"], rows["prompt_length"], strict=True)]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(generation.device)
        with torch.no_grad(), root_gathered(model):
            generated = model.generate(
                **padded,
                do_sample=False,
                use_cache=True,
                max_new_tokens=answer_room(generation.max_length),
                synced_gpus=generation.sharded and world_size() > 1,
            )
        new_tokens = generated[:, padded["input_ids"].shape[1] :]
        texts = tokenizer.batch_decode(new_tokens, skip_special_tokens=True)
        answers.update(zip(batch, (text.strip() for text in texts), strict=True))
    return {number: text for part in gather_lists(list(answers.items())) for number, text in part}


def root_gathered(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """FSDP1 gathers the parameters outside its blocks (embedding, last norm, head) in its own forward method, which
    generate() goes round: "'weight' must be 2-D". Nothing to do for other models."""
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    return contextlib.nullcontext()
