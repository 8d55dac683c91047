"""Compute Exact Match and F1 of a saved model by greedy generation on the evaluation questions.

    python scripts/evaluate.py --model_name output/123 --dataset data/squad_sample.json --eval_size 50
    torchrun --nproc_per_node=2 scripts/evaluate.py --model_name output/123 --eval_size 100
    python scripts/evaluate.py --model_name output/123 --dataset my-squad.json --show 5    # also print 5 answers

evaluate.py reads the same flags and variables as train.py, so the same seed and sizes give the same questions. The
scores come from torchmetrics. The Hugging Face library "evaluate" is not used.
"""

from dataclasses import replace
from typing import Any

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

import torch

from data_loader import load_set
from distributed import watchdog
from distributed.process_group import adopt_process_group, leave_process_group, prepare_environment, run_and_exit
from measure.exact_match import Generation, check_references, exact_match_and_f1
from model import check_model, load_model, load_tokenizer
from settings.command_line import parse_command_line
from settings.precision import DTYPES
from settings.trainer_flags import training_arguments
from shared.hub import draw_bars_on_terminals_only
from tasks import task_of


def main() -> None:
    draw_bars_on_terminals_only()
    settings = parse_command_line(__doc__)
    of_training = {
        "deepspeed": settings.trainer.deepspeed,
        "fsdp": settings.trainer.fsdp,
        "tensor_parallel": settings.model.tensor_parallel > 1,
        "lora_rank": settings.model.lora_rank,  # the weights of a saved model contain the adapters
    }
    for flag, given in of_training.items():
        if given:
            raise settings.error(flag, "evaluation holds the whole saved model on every rank", "leave it out")
    prepare_environment(shards=False)
    args = training_arguments(settings, ddp_timeout=watchdog.start(settings.trainer.ddp_timeout))
    adopt_process_group(args, with_deepspeed=False)
    tokenizer = load_tokenizer(settings.model, settings.data)
    questions, _ = load_set("eval", settings.data.eval_size, settings.data, tokenizer, args)
    if task_of(questions.column_names).pieces:
        what = "is a text, which has no answers to score"
        raise settings.error("dataset", what, "train.py prints the loss of held out pieces and its perplexity")
    check_references(tokenizer, questions, settings.data.max_length)
    watchdog.progress("loading the model")
    model: Any = load_model(settings.model, tokenizer, args.seed)
    check_model(model, tokenizer, settings.data.max_length)
    model.to(args.device)
    generation = Generation(settings.data.em_f1_batch_size, settings.data.max_length, args.device)
    with torch.autocast(args.device.type, dtype=DTYPES[settings.precision], enabled=settings.precision != "fp32"):
        exact_match_and_f1(model, tokenizer, questions, generation, replace(settings.data, em_f1=True))
    leave_process_group()


if __name__ == "__main__":
    run_and_exit(main)
