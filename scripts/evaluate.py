"""Exact Match and F1 of a saved model, by greedy generation on the evaluation questions.

    python scripts/evaluate.py --model_name output/123 --dataset data/squad_sample.json --eval_size 50
    torchrun --nproc_per_node=2 scripts/evaluate.py --model_name output/123 --eval_size 100

It reads the same flags and variables as train.py, so the same seed and sizes give the same questions. (Hugging Face has
a library called evaluate. Nothing here imports it: the scores are torchmetrics'. The name says what the file does.)
"""

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from datasets import Dataset
from torch.distributed.fsdp import FullyShardedDataParallel
from transformers import PreTrainedTokenizerBase, TrainingArguments

from data_loader import answer_room, load_evaluation_set
from distributed import watchdog
from distributed.collectives import gather_lists, print_once, rank, world_size
from distributed.process_group import adopt_process_group, leave_process_group, prepare_environment, run_and_exit
from model import check_model, load_model, load_tokenizer
from settings.command_line import argument_errors, own_arguments, parse_command_line, trainer_flags
from shared.errors import WorkshopError
from shared.hub import draw_bars_on_terminals_only


def exact_match_and_f1(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: Dataset,
    batch_size: int,
    max_length: int,
    device: torch.device,
    sharded: bool = False,
    tensor_parallel: int = 1,
) -> dict[str, float]:
    """Percent by the official SQuAD v1.1 rules, over all `questions`, the same on every rank. Collective.

    model: of transformers, or as FSDP1 has wrapped one.
    device: where the model computes. Not its own `device`: FSDP's CPU offload keeps it elsewhere in between.
    sharded: the ranks hold parts of the model, so they must call its forward pass equally often.
    tensor_parallel: so many neighbouring ranks compute together, and answer the same questions.
    """
    squad = load_metric()
    how = (batch_size, max_length, device, sharded, tensor_parallel)
    predictions = answer_questions(model, tokenizer, questions, *how)
    given = [{"id": str(i), "prediction_text": predictions[i]} for i in range(len(questions))]
    references: list[dict] = [
        {"id": str(i), "answers": {"text": answers, "answer_start": [0] * len(answers)}}
        for i, answers in enumerate(questions["answers"])
    ]
    return {name: round(float(value), 4) for name, value in squad(given, references).items()}


def load_metric() -> Callable:
    """torchmetrics' SQuAD. It brings matplotlib along, which a training without EM and F1 need not wait for."""
    from torchmetrics.functional.text import squad

    return squad


def answer_questions(
    model: Any,
    tokenizer: PreTrainedTokenizerBase,
    questions: Dataset,
    batch_size: int,
    max_length: int,
    device: torch.device,
    sharded: bool,
    tensor_parallel: int = 1,
) -> dict[int, str]:
    """Number of the question -> generated answer, for all questions on every rank."""
    # Prompts of similar length in each batch, so that few are padded; the longest first, which need most memory.
    by_length = sorted(range(len(questions)), key=questions["prompt_length"][:].__getitem__, reverse=True)
    # Every group gets equally many: with sharded weights a rank without a batch would leave the others waiting.
    groups = world_size() // tensor_parallel
    numbers = [*by_length, *by_length[-1:] * (-len(questions) % groups)][rank() // tensor_parallel :: groups]
    answers: dict[int, str] = {}
    model.eval()
    for start in range(0, len(numbers), batch_size):
        watchdog.progress(f"EM and F1, question {start} of {len(numbers)}")
        batch = numbers[start : start + batch_size]
        rows = questions.select(batch)
        prompts = [ids[:n] for ids, n in zip(rows["input_ids"], rows["prompt_length"], strict=True)]
        padded = tokenizer.pad({"input_ids": prompts}, padding_side="left", return_tensors="pt").to(device)
        with torch.no_grad(), root_gathered(model):
            generated = model.generate(
                **padded,
                do_sample=False,
                use_cache=True,
                max_new_tokens=answer_room(max_length),
                synced_gpus=sharded and world_size() > 1,
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


def main() -> None:
    draw_bars_on_terminals_only()
    options = parse_command_line(__doc__)
    for flag in ("deepspeed", "fsdp"):
        if options.values[flag]:
            raise WorkshopError(f"--{flag}", "evaluation holds the whole model on every rank", "leave the flag out")
    if options.values["tensor_parallel"] > 1:
        raise options.error("tensor_parallel", "evaluation holds the whole model on every rank", "leave it out")
    prepare_environment(shards=False)
    model_args, data_args = own_arguments(options)
    flags = trainer_flags(options)
    flags["ddp_timeout"] = watchdog.start(options.values["ddp_timeout"])
    with argument_errors():
        args = TrainingArguments(**flags)
    adopt_process_group(args, with_deepspeed=False)
    tokenizer = load_tokenizer(model_args, data_args)
    questions = load_evaluation_set(data_args, tokenizer, args)
    watchdog.progress("loading the model")
    model: Any = load_model(model_args, tokenizer, args.seed)
    check_model(model, tokenizer, data_args.max_length)
    model.to(args.device)
    dtype = torch.float16 if args.fp16 else torch.bfloat16
    with torch.autocast(args.device.type, dtype=dtype, enabled=args.fp16 or args.bf16):
        batch_size = data_args.em_f1_batch_size
        scores = exact_match_and_f1(model, tokenizer, questions, batch_size, data_args.max_length, args.device)
    print_once(f"exact_match {scores['exact_match']:.2f}  f1 {scores['f1']:.2f}")
    leave_process_group()


if __name__ == "__main__":
    run_and_exit(main)
