"""Exact Match and F1 of a model, from its answers to the evaluation questions by greedy generation."""

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
    """Settings for answering the questions.

    batch_size: number of questions that a rank answers at the same time. max_length: tokens of the longest training
    sequence. device: the device on which the model computes. (The model's own `device` can differ, because FSDP's CPU
    offload moves the weights to the CPU between forward passes.) sharded: True if the ranks hold shards of the model,
    so that all ranks must call its forward pass equally often. tensor_parallel: number of neighbouring ranks that
    compute together and answer the same questions.
    """

    batch_size: int
    max_length: int
    device: torch.device
    sharded: bool = False
    tensor_parallel: int = 1


def exact_match_and_f1(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Dataset, generation: Generation, show: int = 0
) -> dict[str, float]:
    """Print and return both scores in percent, by the official SQuAD v1.1 rules, over all `questions`. Collective.

    model: a model of transformers, which FSDP1 may have wrapped. show: number of questions to print with their answers.
    """
    squad = load_metric()
    predictions = answer_questions(model, tokenizer, questions, generation)
    given = [{"id": str(i), "prediction_text": predictions[i]} for i in range(len(questions))]
    references: list[dict] = [
        {"id": str(i), "answers": {"text": answers, "answer_start": [0] * len(answers)}}
        for i, answers in enumerate(questions["answers"])
    ]
    for i in range(min(show, len(questions))):
        right = " | ".join(questions[i]["answers"])
        print_once(f"question: {questions[i]['question']}\n  right answer: {right}\n  model's answer: {predictions[i]}")
    scores = {name: round(float(value), 4) for name, value in squad(given, references).items()}
    print_once(f"exact_match {scores['exact_match']:.2f}  f1 {scores['f1']:.2f}")
    return scores


def load_metric() -> Callable:
    """Return torchmetrics' SQuAD metric. Import it only here, because it also imports matplotlib, which is slow."""
    from torchmetrics.functional.text import squad

    return squad


def answer_questions(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Dataset, generation: Generation
) -> dict[int, str]:
    """Map the number of each question to its generated answer, for all questions on every rank. Collective."""
    # Batches of similar length need little padding. The longest batches need the most memory, so they come first
    by_length = sorted(range(len(questions)), key=questions["prompt_length"][:].__getitem__, reverse=True)
    # All groups get equally many questions: with sharded weights, other ranks would wait for a rank without a batch
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
    """Gather the parameters outside FSDP1's blocks: embedding, last norm and head. Other models stay unchanged.

    FSDP1 gathers them in its own forward method, which generate() does not call. Without this, generate() fails with
    "'weight' must be 2-D".
    """
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    return contextlib.nullcontext()
