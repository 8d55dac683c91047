"""Exact Match and F1 of a model, from its answers to the evaluation questions by greedy generation."""

import contextlib
import unicodedata
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import GenerationConfig, PreTrainedTokenizerBase

from config import DataArguments
from data_loader import answer_limit
from distributed import watchdog
from distributed.collectives import gather_lists, print_once, rank, world_size
from distributed.strategy import PLAIN, Strategy
from tasks import task_of
from tasks.passage import tokenise_answers
from tasks.task import decode

# Reasons why the scores of a question are not fair
CHANGED = "the right answer cannot score 100, because the tokenizer or --max_length changes it"
EMPTY = "an empty answer scores 100, because the metric ignores articles and punctuation"


@dataclass(frozen=True)
class Generation:
    """Settings for answering the questions.

    batch_size: number of questions that a rank answers at the same time. max_length: tokens of the longest training
    sequence. device: the device on which the model computes. (The model's own `device` can differ, because FSDP's CPU
    offload moves the weights to the CPU between forward passes.) strategy: how the ranks divide the model. By
    default each rank has the whole model.
    """

    batch_size: int
    max_length: int
    device: torch.device
    strategy: Strategy = PLAIN


def exact_match_and_f1(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Dataset, generation: Generation, data_args: DataArguments
) -> dict[str, float]:
    """Print the first --show questions with their answers. Print and return Exact Match and F1 over all. Collective.

    The scores are in percent, by the official SQuAD rules. With --em_f1 False, there are none. model: a model of
    transformers, which FSDP1 may have wrapped.
    """
    show = min(data_args.show, len(questions))
    if not data_args.em_f1:
        questions = questions.select(range(show))
    limit = answer_limit(questions, tokenizer, generation.max_length)
    predictions = answer_questions(model, tokenizer, questions, generation, limit)
    for i in range(show):
        kind = task_of(questions.column_names).rows.removesuffix("s")
        right = " | ".join(questions[i]["answers"])
        print_once(f"{kind}: {questions[i]['question']}\n  right answer: {right}\n  model's answer: {predictions[i]}")
    if not data_args.em_f1:
        return {}
    scores = score([predictions[i] for i in range(len(questions))], questions["answers"][:])
    print_once(f"exact_match {scores['exact_match']:.2f}  f1 {scores['f1']:.2f}")
    return scores


def score(given: list[str], references: list[list[str]]) -> dict[str, float]:
    """Return exact_match and f1 in percent. Each given answer has a list of reference answers.

    The same letter can have several Unicode forms (é, or e and an accent), and some tokenizers change the form. NFC
    makes the forms equal. NFKC would also make different texts equal, such as 10² and 102.
    """
    from torchmetrics.functional.text import squad  # only here, because it also imports matplotlib, which is slow

    form = partial(unicodedata.normalize, "NFC")
    predictions: Any = [{"id": str(i), "prediction_text": form(text)} for i, text in enumerate(given)]
    targets: Any = [
        {"id": str(i), "answers": {"text": [*map(form, texts)], "answer_start": [0] * len(texts)}}
        for i, texts in enumerate(references)
    ]
    return {name: round(float(value), 4) for name, value in squad(predictions, targets).items()}


def check_references(tokenizer: PreTrainedTokenizerBase, questions: Dataset, max_length: int) -> dict[str, int]:
    """Return the number of questions whose scores are not fair, by reason. Print each reason with an example.

    Each reference answer goes the way of a generated one: into tokens, up to the limit, into text, into the metric. If
    none of a question's answers then scores 100, a model that knows the answer cannot score 100 either.
    """
    limit = answer_limit(questions, tokenizer, max_length)
    unfair: dict[str, list[str]] = {}
    for references in questions["answers"]:
        given = [decode(tokens[:limit], tokenizer) for tokens in tokenise_answers(references, tokenizer)]
        if not any(text in references or score([text], [references])["exact_match"] for text in given):
            unfair.setdefault(CHANGED, []).append(f"{references[0]!r:.60} becomes {given[0]!r:.60}")
        elif score([""], [references])["exact_match"]:
            unfair.setdefault(EMPTY, []).append(f"{references[0]!r:.60}")
    for reason, examples in unfair.items():
        print_once(f"{len(examples)} of {len(questions)} evaluation questions: {reason} ({examples[0]})")
    if shortened := sum(length > max_length - limit for length in questions["prompt_length"]):
        print_once(f"{shortened} of {len(questions)} prompts are cut further, to leave {limit} tokens for an answer")
    return {reason: len(examples) for reason, examples in unfair.items()}


def answer_questions(
    model: Any, tokenizer: PreTrainedTokenizerBase, questions: Dataset, generation: Generation, limit: int
) -> dict[int, str]:
    """Map the number of each question to its generated answer, for all questions on every rank. Collective.

    limit: largest number of tokens of an answer. Prompts are shortened, so that prompt and answer fit.
    """
    greedy = GenerationConfig(
        do_sample=False,
        num_beams=1,
        use_cache=True,
        max_new_tokens=limit,
        eos_token_id=task_of(questions.column_names).ends(tokenizer),
        pad_token_id=tokenizer.pad_token_id,
    )
    # generate() takes each value that `greedy` leaves out, such as repetition_penalty, from the settings in the model's
    # folder. So replace these settings until all questions are answered
    whole = model.module if isinstance(model, FullyShardedDataParallel) else model
    settings_of_folder = whole.generation_config
    whole.generation_config = greedy
    # Batches of similar length need little padding. The longest batches need the most memory, so they come first
    by_length = sorted(range(len(questions)), key=questions["prompt_length"][:].__getitem__, reverse=True)
    # All groups get equally many questions: with sharded weights, other ranks would wait for a rank without a batch
    tensor = generation.strategy.degrees.tensor  # number of neighbouring ranks that answer the same questions
    groups = world_size() // tensor
    own_group = rank() // tensor
    numbers = [*by_length, *by_length[-1:] * (-len(questions) % groups)][own_group::groups]
    answers: dict[int, str] = {}
    task = task_of(questions.column_names)
    model.eval()
    for start in range(0, len(numbers), generation.batch_size):
        watchdog.progress(f"EM and F1, question {start} of {len(numbers)}")
        batch = numbers[start : start + generation.batch_size]
        room = generation.max_length - limit
        prompts = [task.prompt(row, room, tokenizer) for row in questions.select(batch)]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(generation.device)
        with torch.no_grad(), root_gathered(model):
            generated = model.generate(
                **padded,
                generation_config=greedy,
                synced_gpus=generation.strategy.shards_weights and world_size() > 1,
            )
        new_tokens = generated[:, padded["input_ids"].shape[1] :]
        answers.update(zip(batch, (decode(row, tokenizer) for row in new_tokens), strict=True))
    whole.generation_config = settings_of_folder
    return {number: text for part in gather_lists(list(answers.items())) for number, text in part}


def root_gathered(model: torch.nn.Module) -> contextlib.AbstractContextManager:
    """Gather the parameters outside FSDP1's blocks: embedding, last norm and head. Other models stay unchanged.

    FSDP1 gathers them in its own forward method, which generate() does not call. Without this, generate() fails with
    "'weight' must be 2-D".
    """
    if isinstance(model, FullyShardedDataParallel):
        return FullyShardedDataParallel.summon_full_params(model, recurse=False, writeback=False)
    return contextlib.nullcontext()
