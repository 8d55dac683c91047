"""Fine-tune a causal language model on SQuAD with the Hugging Face Trainer: plain, with DDP, DeepSpeed ZeRO or FSDP.

On a laptop, no network needed. Flags have variables, too (python scripts/knobs.py): TRAIN_SIZE=256 is --train_size 256.
    python scripts/train.py --model_name tiny-bloom --dataset data/squad_sample.json --train_size 256 --eval_size 64

BLOOM-560m on one GPU, on two with DDP, then with ZeRO-1, then on two GPUs with ZeRO-2 and CPU offload:
    python scripts/train.py
    torchrun --nproc_per_node=2 scripts/train.py
    python scripts/train.py --deepspeed ds_configs/zero1.json
    torchrun --nproc_per_node=2 scripts/train.py --deepspeed ds_configs/zero2_cpu_offload.json

With FSDP on two GPUs: FULL_SHARD, or a strategy of the folder fsdp_configs:
    torchrun --nproc_per_node=2 scripts/train.py --fsdp
    torchrun --nproc_per_node=2 scripts/train.py --fsdp --fsdp_config fsdp_configs/shard_grad_op.json

With tensor parallelism, of the custom GPT, a Llama or a Qwen2:
    torchrun --nproc_per_node=2 scripts/train.py --model_name custom-gpt --tensor_parallel 2 --save_strategy no

Your own data and model, going on after an interruption:
    python scripts/train.py --model_name ./my-model --dataset my.json --train_size 1000 --resume_from_checkpoint
"""

import sys
from pathlib import Path
from typing import Any

from transformers import ProgressCallback, TrainingArguments

from config import argument_errors, compute_dtype, own_arguments, parse_command_line, trainer_flags
from data_loader import collator, load_squad, questions_cut
from errors import ENVIRONMENT
from evaluate import exact_match_and_f1, load_metric
from hub import draw_bars_on_terminals_only
from job.finish import finish
from model import empty_model, load_model, load_tokenizer, save_model
from parallel import watchdog
from parallel.distributed import (
    join_process_group,
    leave_process_group,
    prepare_environment,
    print_once,
    rank,
    run_and_exit,
    same_everywhere,
    world_size,
)
from parallel.ds_config import check_contradictions, check_ds_config
from parallel.fsdp_config import check_fsdp_config, parallelism, shard_on_cpu, trainer_config
from parallel.tensor_parallel import check_tensor_parallel, cut
from tracking import close_trackers, prepare_trackers
from training.audit import AuditCallback, check_can_train, strategy_name
from training.callbacks import (
    FiniteLossCallback,
    HeartbeatCallback,
    LogLinesCallback,
    RecordCallback,
    TrainSpeedCallback,
    UtilisationCallback,
)
from training.checkpoints import (
    CheckpointCallback,
    check_room,
    check_same_training,
    find_checkpoint,
    marker_of,
    remove_checkpoints_of_stops,
    saving,
    step_of,
)
from training.chunked_loss import use_chunked_loss
from training.compiling import check_torch_compile
from training.flops import flops_of, matmul_peak
from training.profiling import ProfileCallback
from training.record import RunRecord, new_job_id, refuse_finished, sole_writer
from training.safe_load import load_weights_only, refuse_foreign_code
from training.stopping import StopCallback, StopRequest
from training.trainer import WorkshopTrainer


def main() -> None:
    # Ctrl-C, or a signal of Slurm. In the training it is noted: at the end of the step a checkpoint is saved, and the
    # run ends in section 7 with exit code 75. Before and after the training it just ends the run.
    stop = StopRequest()
    stop.listen()
    draw_bars_on_terminals_only()

    # 1. Options: flags, variables and config files. The sections 1 to 4 only check; nothing is written before the 5th.
    options = parse_command_line(__doc__)
    values = options.values
    deepspeed = values["deepspeed"]  # a file of ds_configs/, or None
    fsdp: Any = bool(values["fsdp"])  # how, stands in a file of fsdp_configs/ (--fsdp_config); without one FULL_SHARD
    tensor_parallel = values["tensor_parallel"]  # ranks over which each matrix is cut, 1 for whole ones
    prepare_environment(shards=bool(deepspeed or fsdp))
    if deepspeed:
        options.deepspeed_config = check_ds_config(deepspeed)
    check_tensor_parallel(options, world_size())
    if fsdp:
        options.fsdp_config = check_fsdp_config(values["fsdp"], values["fsdp_config"], tensor_parallel)
    # With both, train.py shards the model itself (section 6), and the Trainer is told nothing of FSDP
    trainers_fsdp = options.fsdp_config if tensor_parallel == 1 else None
    model_args, data_args = own_arguments(options)

    # 2. The Trainer's arguments. They turn on ZeRO or FSDP; with neither, several processes train with DDP. They must
    #    come before the model: ZeRO-3 shards its weights while they are loaded.
    flags = trainer_flags(options)
    # From here on a rank that hangs ends the run, with its name in the log. The time-out of the collectives is longer.
    flags["ddp_timeout"] = watchdog.start(values["ddp_timeout"])
    with argument_errors():
        args = TrainingArguments(
            **flags,
            deepspeed=deepspeed,
            fsdp=fsdp and tensor_parallel == 1,
            fsdp_config=trainer_config(trainers_fsdp),
            parallelism_config=parallelism(trainers_fsdp),  # of HYBRID_SHARD: replicas x shards
        )
    if deepspeed:
        check_contradictions(options, args)
    join_process_group(args, with_deepspeed=bool(deepspeed))  # TrainingArguments has opened it; also for DeepSpeed

    # 3. Where results go, and the checkpoint to go on from, if one was asked for or Slurm has started this job again.
    job_id = new_job_id()  # JOB_ID, Slurm's, or a new one
    args.output_dir = values["output_dir"] or f"output/{job_id}"
    record = RunRecord(job_id)
    strategy = strategy_name(options)
    load_weights_only(with_deepspeed=bool(deepspeed))  # from here on: a checkpoint is a pickle, and could run code
    requested = args.resume_from_checkpoint
    checkpoint = same_everywhere(find_checkpoint(requested, args.output_dir, job_id))
    if checkpoint:
        refuse_foreign_code(Path(checkpoint))
    else:
        refuse_finished(record.path, args.output_dir)

    # 4. Tokenizer and data. The skeleton is the model without memory for its weights: can it be trained like this?
    watchdog.beat("reading the data")
    skeleton = empty_model(model_args, data_args)
    tokenizer = load_tokenizer(model_args, data_args)
    check_can_train(options, skeleton, tokenizer)
    train_dataset, eval_dataset = load_squad(data_args, tokenizer, args)
    # written into each checkpoint: which training it belongs to
    marker = marker_of(job_id, options, strategy, args.world_size, train_dataset)
    if checkpoint:
        check_same_training(checkpoint, marker)
    if rank() == 0:
        check_room(args.output_dir, options, skeleton, strategy, args.save_total_limit)
    if data_args.em_f1:
        load_metric()  # if it is missing, the run ends now and not after the training
    if args.torch_compile:
        check_torch_compile(args)

    # 5. The run record. From here on the run leaves files. A second run of this job's id is refused, and however this
    #    one ends, the record says so.
    with sole_writer(job_id), record:
        first_step = step_of(checkpoint) if checkpoint else 0
        if checkpoint:
            print_once(f"going on from step {first_step}: {checkpoint}")
        record.start(
            first_step,
            run_name=args.run_name,
            output_dir=args.output_dir,
            resumed_from=checkpoint,
            settings=options.settings(),
            train_size=len(train_dataset),
            eval_size=len(eval_dataset),
            questions_cut=questions_cut(train_dataset, eval_dataset),
            configs={
                "model": skeleton.config.to_diff_dict(),
                "deepspeed": options.deepspeed_config,
                "fsdp": options.fsdp_config,
            },
        )
        watchdog.before_exit(lambda: finish(record.path, "failed", ENVIRONMENT))  # its word on a run that hangs
        prepare_trackers(args, job_id)
        peak = matmul_peak(compute_dtype(values), args.device)  # what the hardware can do at best, for MFU

        # 6. Model and Trainer.
        watchdog.beat("loading the model")
        model = load_model(model_args, data_args, tokenizer, args.seed)
        if model_args.loss == "chunked":
            use_chunked_loss(model)
        flops = flops_of(model, record)  # that a token needs, for MFU; None with the reason in the record
        if tensor_parallel > 1:
            cut(model, tensor_parallel, options.fsdp_config, args.device)
        if fsdp or tensor_parallel > 1:
            shard_on_cpu()  # where there is no GPU accelerate would run DDP instead, without a word
        trainer = WorkshopTrainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collator(tokenizer, data_args),
        )
        add_callbacks(trainer, options, record, stop, marker, checkpoint, flops, peak)

        # 7. Training, with an evaluation and a checkpoint after each epoch (--eval_strategy, --save_strategy).
        trainer.train(resume_from_checkpoint=checkpoint)
        close_trackers(args, job_id, record.content["callbacks"])
        stop.exit_if_stopped(trainer, record)  # after Ctrl-C: with 75, and a checkpoint to go on from

        # 8. The model.
        watchdog.beat("saving the model")
        if args.save_strategy == "no" and tensor_parallel == 1:
            print_once("model not saved (SAVE_STRATEGY=no)")
        else:
            with saving(Path(args.output_dir)):
                save_model(trainer, tokenizer, args.output_dir)

        # 9. Exact Match and F1 of its answers.
        if data_args.em_f1:
            with trainer.accelerator.autocast():  # once around all answers, or the weights are cast for each token
                scores = exact_match_and_f1(
                    trainer.model,
                    tokenizer,
                    eval_dataset,
                    batch_size=data_args.em_f1_batch_size,
                    max_length=data_args.max_length,
                    device=args.device,
                    sharded=fsdp or strategy == "DeepSpeed ZeRO-3",
                    tensor_parallel=tensor_parallel,
                )
            print_once(f"exact_match {scores['exact_match']:.2f}  f1 {scores['f1']:.2f}")
            record.update(**scores)
        record.measure_process_memory()  # again, as RecordCallback did: saving and answers need memory, too
        if args.save_strategy == "no":  # a stop saves in spite of it, and nobody needs that any more
            remove_checkpoints_of_stops(args.output_dir)
    print_once(f"Run record: {record.path}")
    leave_process_group()


def add_callbacks(trainer, options, record, stop, marker, checkpoint, flops, peak) -> None:
    """What is done beside the steps, in this order at each event, behind transformers' own callbacks, which decide when
    to log, evaluate and save."""
    speed = TrainSpeedCallback(trainer, flops, peak, options.values["profile"])
    stopping = [StopCallback(stop, trainer)]
    if options.values["tensor_parallel"] > 1:
        print_once("--tensor_parallel writes no checkpoints: a stop ends this run at once, and it is lost")
        stopping = []
    utilisation = UtilisationCallback()
    callbacks = [
        speed,  # its clock stops before the others work
        utilisation,
        AuditCallback(trainer, options, record),  # ends a run that is not what was asked for
        RecordCallback(trainer, record, speed, utilisation),  # at the end: losses, rates, peaks of memory
        CheckpointCallback(trainer, marker, speed, checkpoint),  # marks what was saved as complete
        *stopping,  # and only then the run may end
        FiniteLossCallback(trainer),  # ends a run whose loss is no number, at the end of a step, before it is saved
        HeartbeatCallback(),  # tells the watchdog what comes next
    ]
    if options.values["profile"]:
        callbacks.append(ProfileCallback(trainer, record))
    for callback in callbacks:
        trainer.add_callback(callback)
    if not sys.stderr.isatty() and not trainer.args.disable_tqdm:  # lines instead of bars, in a log
        trainer.pop_callback(ProgressCallback)
        trainer.add_callback(LogLinesCallback())


if __name__ == "__main__":
    run_and_exit(main)
