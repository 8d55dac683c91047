"""Fine-tune a causal language model on SQuAD with the Hugging Face Trainer: plain, with DDP, DeepSpeed ZeRO or FSDP.

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
    python scripts/train.py --model_name ./my-model --dataset my-squad.json --resume_from_checkpoint
"""

from dataclasses import replace

from shared.before_imports import prepare_imports

prepare_imports()  # must come before the other imports, because PyTorch reads variables when it is imported

from transformers import TrainingArguments, set_seed

from config import has_random_weights
from data_loader import collator, load_squad
from distributed import watchdog
from distributed.collectives import broadcast_from_rank_0, print_once, world_size
from distributed.ds_config import check_contradictions, check_ds_config
from distributed.fsdp_config import check_fsdp_config, parallelism, shard_on_cpu, trainer_config
from distributed.process_group import adopt_process_group, leave_process_group, prepare_environment, run_and_exit
from distributed.tensor_parallel import apply_tensor_parallel, check_tensor_parallel
from lora import add_adapters
from model import build_meta_model, load_model, load_tokenizer, save_model
from records.run_environment import new_job_id
from records.writer import RunRecord
from settings.command_line import parse_command_line
from settings.precision import DTYPES
from settings.trainer_flags import argument_errors, trainer_flags
from shared.hub import check_files, draw_bars_on_terminals_only
from shared.trackers import close_trackers, prepare_trackers
from training.audit import strategy_name
from training.callbacks import Run, add_callbacks
from training.checks_before_training import check_room, check_saving, check_trainable
from training.chunked_loss import use_chunked_loss
from training.energy import EnergyMeter
from training.exact_match import Generation, check_references, exact_match_and_f1
from training.find_checkpoints import (
    check_for_code,
    check_same_training,
    effects_of_other_ranks,
    find_checkpoint,
    forbid_code_in_checkpoints,
    keep_global_batch,
    read_marker,
    training_identity,
)
from training.flops import matmul_peak, model_flops
from training.measured_memory import record_process_peaks
from training.save_checkpoints import full_disk_errors, remove_stop_checkpoints
from training.stopping import StopRequest
from training.trainer import WorkshopTrainer


def main() -> None:
    # Handle Ctrl-C and the signals of Slurm. During the training, a signal saves a checkpoint at the end of the step,
    # and the run ends in section 7 with exit code 75. Before and after the training, a signal ends the run at once.
    stop = StopRequest()
    stop.install_handlers()
    draw_bars_on_terminals_only()

    # 1. Settings: flags, variables and config files. An error that sections 1 to 4 find ends the run with one line,
    #    before the model is loaded and before the run record begins.
    settings = parse_command_line(__doc__)  # settings.model, .data and .trainer hold the flags by their names
    deepspeed = settings.trainer.deepspeed  # a file in ds_configs/, or None
    fsdp = bool(settings.trainer.fsdp)  # --fsdp_config names a file in fsdp_configs/; without one, FULL_SHARD
    tensor_parallel = settings.model.tensor_parallel  # number of ranks over which each matrix is cut
    prepare_environment(shards=bool(deepspeed or fsdp))
    job_id = new_job_id()  # JOB_ID if it is set, otherwise Slurm's id, otherwise a new id
    output_dir = settings.trainer.output_dir or f"output/{job_id}"
    # If Slurm has restarted this job on another number of ranks, the accumulation keeps the global batch
    settings = keep_global_batch(settings, output_dir, job_id, world_size())
    print_once("\n".join(settings.knob_lines()))  # each knob with its source: a flag, the site, config.py, ...
    if deepspeed:
        settings = replace(settings, deepspeed_config=check_ds_config(deepspeed))
    check_tensor_parallel(settings, world_size())
    if fsdp:
        fsdp_config = check_fsdp_config(settings)
        settings = replace(settings, fsdp_config=fsdp_config)
    # FSDP config for the Trainer. With tensor parallelism it is None, because section 6 then shards the model itself
    trainer_fsdp_config = settings.fsdp_config if tensor_parallel == 1 else None

    # 2. The Trainer's arguments. They turn on ZeRO or FSDP; with neither, several processes train with DDP. They must
    #    be created before the model, because ZeRO-3 shards the weights while they are loaded.
    flags = trainer_flags(settings)
    # From here on, a rank that hangs for --ddp_timeout seconds ends the run, and the log names this rank. PyTorch's own
    # time-outs, which do not name the rank, come later.
    flags["ddp_timeout"] = watchdog.start(settings.trainer.ddp_timeout)
    with argument_errors():
        args = TrainingArguments(
            **flags,
            deepspeed=deepspeed,
            fsdp=trainer_fsdp_config is not None,  # type: ignore[arg-type]  # transformers 5 takes a bool
            fsdp_config=trainer_config(trainer_fsdp_config),
            parallelism_config=parallelism(trainer_fsdp_config),  # replicas x shards, for HYBRID_SHARD
        )
    if deepspeed:
        check_contradictions(settings, args)
    adopt_process_group(args, with_deepspeed=bool(deepspeed))  # DeepSpeed uses the group of TrainingArguments

    # 3. The output folder, and the checkpoint to resume from, if one was requested or if Slurm has restarted this job.
    args.output_dir = output_dir
    record = RunRecord(job_id, output_dir)
    strategy = strategy_name(settings)
    # A checkpoint is a pickle, and loading a pickle can run code. From here on, a file with code does not load
    forbid_code_in_checkpoints(with_deepspeed=bool(deepspeed))
    checkpoint = broadcast_from_rank_0(find_checkpoint(args.resume_from_checkpoint, args.output_dir, job_id))
    if checkpoint:
        check_files(checkpoint)
        check_for_code(checkpoint)
    else:
        record.refuse_to_overwrite()

    # 4. Tokenizer and data. A model on PyTorch's meta device has shapes, but no memory for weights. The shapes are
    #    enough to check whether it can be trained with these settings.
    watchdog.progress("reading the data")  # the watchdog treats a rank without progress for --ddp_timeout as hung
    meta_model = build_meta_model(settings.model)
    if settings.model.lora_rank:
        add_adapters(meta_model, settings.model.lora_rank)
    tokenizer = load_tokenizer(settings.model, settings.data)
    check_trainable(settings, args, meta_model, tokenizer)
    train_dataset, eval_dataset = load_squad(settings.data, tokenizer, args)
    data = replace(
        settings.data, train_size=len(train_dataset), eval_size=len(eval_dataset)
    )  # the values may have been "all"
    settings = replace(settings, data=data)
    # Settings, config and data of this training. Each checkpoint contains them, and only the same training can resume
    identity = training_identity(job_id, settings, strategy, args.world_size, train_dataset)
    if checkpoint:
        check_same_training(checkpoint, identity)
    check_room(args.output_dir, settings, meta_model, strategy, args.save_total_limit)

    # 5. The run record, results/<job id>.json. It records how this run ends. A second run with the same job id or the
    #    same output folder is refused.
    with record:
        first_step = read_marker(checkpoint)["step"] if checkpoint else 0
        if checkpoint:
            lines = effects_of_other_ranks(checkpoint, identity, len(train_dataset))
            print_once("\n".join([f"resuming from step {first_step}: {checkpoint}", *lines]))
        record.start(
            first_step,
            run_name=args.run_name,
            output_dir=args.output_dir,
            resumed_from=checkpoint,
            settings=settings.recorded(),
            origins=settings.origins,
            train_size=len(train_dataset),
            eval_size=len(eval_dataset),
            questions_cut={"train": sum(train_dataset["cut"][:]), "eval": sum(eval_dataset["cut"][:])},
            answers_cut={"train": sum(train_dataset["answer_cut"][:]), "eval": sum(eval_dataset["answer_cut"][:])},
            unfair_questions=check_references(tokenizer, eval_dataset, data.max_length) if data.em_f1 else None,
            configs={
                "model": meta_model.config.to_diff_dict(),
                "deepspeed": settings.deepspeed_config,
                "fsdp": settings.fsdp_config,
            },
        )
        watchdog.before_exit(record.close_as_hung)
        prepare_trackers(args, job_id)
        peak = matmul_peak(DTYPES[settings.precision], args.device)  # the hardware's peak, for MFU

        # 6. Model and Trainer.
        watchdog.progress("loading the model")
        model = load_model(settings.model, tokenizer, args.seed)
        if settings.model.lora_rank:
            # Frozen weights need no fp32 masters, so they have the precision of the computation
            set_seed(args.seed)
            add_adapters(model, settings.model.lora_rank, DTYPES[settings.precision])
        check_saving(model, tokenizer)
        if settings.model.loss == "chunked":
            use_chunked_loss(model)
        # FLOPs per token, for MFU. None if unknown; the record gives the reason
        flops = model_flops(meta_model, settings.data.max_length, record)
        if tensor_parallel > 1:
            apply_tensor_parallel(model, tensor_parallel, settings.fsdp_config, args.device)
        if fsdp or tensor_parallel > 1:
            shard_on_cpu()  # without this, accelerate silently uses DDP if there is no GPU
        trainer = WorkshopTrainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collator(tokenizer, settings.data),
        )
        energy = EnergyMeter()  # counts the joules of the GPUs, from here to the end of the run
        add_callbacks(Run(trainer, settings, record, stop, identity, checkpoint, flops, peak, energy))

        # 7. Training, with an evaluation and a checkpoint after each epoch (--eval_strategy, --save_strategy).
        #    docs/training-loop.md explains what happens in a step, and when the ranks communicate.
        trainer.train(resume_from_checkpoint=checkpoint)
        close_trackers(args, job_id, record.content["callbacks"])  # the trackers' summary gets means over the steps
        stop.save_and_exit_if_asked(trainer, record, energy)  # after Ctrl-C: saves a checkpoint and exits with code 75

        # 8. The model.
        watchdog.progress("saving the model")
        # (--tensor_parallel cannot write checkpoints, so it needs SAVE_STRATEGY=no. Its weights are still saved here)
        if args.save_strategy == "no" and tensor_parallel == 1:
            print_once("model not saved (SAVE_STRATEGY=no)")
        else:
            with record.pause("saving"), full_disk_errors(args.output_dir):
                save_model(trainer, tokenizer, args.output_dir, with_adapters=settings.model.lora_rank > 0)

        # 9. Exact Match and F1 of the model's answers.
        if settings.data.em_f1:
            generation = Generation(
                batch_size=settings.data.em_f1_batch_size,
                max_length=settings.data.max_length,
                device=args.device,
                sharded=fsdp or strategy == "DeepSpeed ZeRO-3",
                tensor_parallel=tensor_parallel,
            )
            # autocast is one context for all answers; otherwise each token casts the weights
            with record.pause("evaluation"), trainer.accelerator.autocast():
                scores = exact_match_and_f1(trainer.model, tokenizer, eval_dataset, generation, settings.data.show)
            if not scores["f1"] and has_random_weights(settings.model.model_name, settings.model.from_scratch):
                print_once("(a score of 0 is expected: this model started with random weights)")
            record.update(**scores)
        record_process_peaks(record)  # a second time after the training: saving and answering also need memory
        energy.record_kwh(record)
        if args.save_strategy == "no":
            # A stop saves a checkpoint even with SAVE_STRATEGY=no. Remove it now that the run has completed
            remove_stop_checkpoints(args.output_dir)
    print_once(f"Run record: {record.path}")
    leave_process_group()


if __name__ == "__main__":
    run_and_exit(main)
