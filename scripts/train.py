"""Fine-tune a causal language model with the Hugging Face Trainer: plain, with DDP, ZeRO, FSDP or tensor parallelism.

On a laptop, without a network. Each flag also has a variable (scripts/config.py): TRAIN_SIZE=256 is --train_size 256.
    python scripts/train.py --model_name tiny-bloom --dataset data/squad_sample.json --train_size 256 --eval_size 64

BLOOM-560m on one GPU, on two GPUs with DDP, on one GPU with ZeRO-1, and on two GPUs with ZeRO-2 and CPU offload:
    python scripts/train.py
    torchrun --nproc_per_node=2 scripts/train.py
    python scripts/train.py --deepspeed ds_configs/zero1.json
    torchrun --nproc_per_node=2 scripts/train.py --deepspeed ds_configs/zero2_cpu_offload.json

With FSDP on two GPUs: FULL_SHARD, or a strategy from the folder fsdp_configs:
    torchrun --nproc_per_node=2 scripts/train.py --fsdp
    torchrun --nproc_per_node=2 scripts/train.py --fsdp --fsdp_config fsdp_configs/shard_grad_op.json

With tensor parallelism, for the custom GPT, a Llama or a Qwen2:
    torchrun --nproc_per_node=2 scripts/train.py --model_name custom-gpt --tensor_parallel 2 --save_strategy no

With your own model and data, resumed from the latest checkpoint of this run, or of the runs next to it:
    python scripts/train.py --model_name ./my-model --dataset questions.csv --resume_from_checkpoint
"""

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

from transformers import set_seed

from config import has_random_weights
from data_loader import collator, load_data
from distributed.collectives import print_once
from distributed.process_group import run_and_exit
from distributed.tensor_parallel import apply_tensor_parallel
from guard.checkpoints import full_disk_errors
from guard.run_frame import start_run
from measure.exact_match import Generation, exact_match_and_f1
from model import load_model, load_tokenizer, save_model
from models.chunked_loss import use_chunked_loss
from models.lora import add_adapters
from models.padding_free import use_padding_free
from settings.precision import DTYPES
from training.callbacks import add_callbacks
from training.trainer import WorkshopTrainer


def main() -> None:
    # 1. Settings: flags, variables and config files. A mistake ends the run with one line, before anything is written.
    start = start_run(__doc__)
    args = start.args  # TrainingArguments, which have turned on ZeRO or FSDP; with neither, several processes use DDP

    # 2. The tokenizer turns texts into numbers.
    tokenizer = load_tokenizer(start.settings.model, start.settings.data)
    start.check_model(tokenizer)  # can this model be trained with these settings?

    # 3. The data, such as questions about texts and their answers, as rows of tokens.
    data = load_data(start.settings.data, tokenizer, args)

    # Does the checkpoint fit, and is there room for new ones? Then lock the output folder, and write the run record.
    with start.recorded(tokenizer, data) as run:
        settings = run.settings  # settings.model, .data and .trainer hold the flags by their names

        # 4. The model. With ZeRO-3, TrainingArguments make load_model keep only this rank's shard of each weight.
        model = load_model(settings.model, tokenizer, args.seed)
        if settings.model.lora_rank:
            set_seed(args.seed)  # the adapters begin with random numbers
            # Frozen weights need no fp32 masters, so they have the precision of the computation
            add_adapters(model, settings.model.lora_rank, DTYPES[settings.precision])
        if settings.data.padding == "none":
            use_padding_free(model)
        if settings.model.loss == "chunked":
            use_chunked_loss(model)
        if run.strategy.degrees.tensor > 1:
            apply_tensor_parallel(model, run.strategy.degrees, args.device)

        # 5. The Trainer of Hugging Face. It wraps the model in DDP, DeepSpeed or FSDP when the training begins.
        run.prepare_trainer(model, tokenizer)
        trainer = WorkshopTrainer(
            model=model,
            args=args,
            train_dataset=data.train,
            eval_dataset=data.evaluation,
            data_collator=collator(tokenizer, settings.data),
            tokenizer=tokenizer,
        )
        add_callbacks(run, trainer)  # measurements, checkpoints, stops

        # 6. Training, with an evaluation and a checkpoint after each epoch (--eval_strategy, --save_strategy).
        #    docs/training-loop.md explains what happens in a step, and when the ranks communicate.
        trainer.train(resume_from_checkpoint=run.checkpoint)  # None for a new training
        run.end_training(trainer)  # if a signal has stopped the training, this saves a checkpoint and ends the run

        # 7. The model is saved for from_pretrained, unless SAVE_STRATEGY=no. (Tensor parallelism needs this value,
        #    because it cannot save checkpoints. Its model is saved all the same.)
        if args.save_strategy == "no" and run.strategy.saves_checkpoints:
            print_once("model not saved (SAVE_STRATEGY=no)")
        else:
            with run.record.pause("saving"), full_disk_errors(run.output_dir):
                save_model(trainer, tokenizer, run.output_dir, settings.model)

        # 8. The model answers the evaluation questions: Exact Match and F1.
        if settings.data.em_f1 or settings.data.show:
            generation = Generation(
                batch_size=settings.data.em_f1_batch_size,
                max_length=settings.data.max_length,
                device=args.device,
                strategy=run.strategy,  # with sharded weights, all ranks must compute equally often
            )
            # One autocast context for all answers casts each weight once, not once per token
            with run.record.pause("evaluation"), trainer.accelerator.autocast():
                scores = exact_match_and_f1(trainer.model, tokenizer, data.evaluation, generation, settings.data)
            if scores.get("f1") == 0 and has_random_weights(settings.model.model_name, settings.model.from_scratch):
                print_once("(a score of 0 is expected: this model started with random weights)")
            run.record.update(**scores)


if __name__ == "__main__":
    run_and_exit(main)
