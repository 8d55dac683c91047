"""The training itself, from the processes to the scores: what train.py does with a command line that it has checked."""

import sys
from pathlib import Path

from transformers import ProgressCallback

from config import Options, build_arguments, compute_dtype
from data_loader import collator, load_squad, questions_cut
from errors import ENVIRONMENT, WorkshopError
from estimate_time import Rates
from evaluate import exact_match_and_f1, load_metric
from hub import draw_bars_on_terminals_only
from job.finish import finish
from model import check_model, empty_model, load_model, load_tokenizer, save_model
from parallel import watchdog
from parallel.distributed import (
    join_process_group,
    leave_process_group,
    print_once,
    rank,
)
from parallel.ds_config import check_contradictions
from parallel.fsdp_config import check_wrap_classes, shard_on_cpu
from tracking import close_trackers, prepare_trackers
from training.audit import AuditCallback, requested_train_size, steps_per_epoch, strategy_name
from training.callbacks import (
    WARM_UP_STEPS,
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
    read_marker,
    remove_checkpoints_of_stops,
)
from training.chunked_loss import check_head, use_chunked_loss
from training.compiling import CompiledCallback, compile_or_eager
from training.flops import ModelFlops, matmul_peak, memory_bandwidth
from training.prediction import bus_bandwidth, predict_memory, predict_time
from training.profiling import PROFILED_STEPS, ProfileCallback
from training.record import RunRecord, new_job_id, refuse_finished, sole_writer
from training.safe_load import load_weights_only, refuse_foreign_code
from training.stopping import StopCallback, StopRequest
from training.trainer import WorkshopTrainer, saving


def run(options: Options, stop: StopRequest, git: dict | None) -> None:
    """Train as the options say, and leave record, model and scores. stop: listening already. git: of rank 0."""
    draw_bars_on_terminals_only()
    deepspeed = options.values["deepspeed"]
    fsdp = options.values["fsdp"]

    # 2. Processes: ranks, process group, one GPU each.
    model_args, data_args, args = build_arguments(options)
    if options.deepspeed_config is not None:
        check_contradictions(deepspeed, options.deepspeed_config, args, options.names)
    join_process_group(with_deepspeed=bool(deepspeed))

    # 3. Where results go.
    job_id = new_job_id()
    args.output_dir = options.values["output_dir"] or f"output/{job_id}"
    record = RunRecord(job_id)
    strategy = strategy_name(options)
    load_weights_only(with_deepspeed=bool(deepspeed))
    checkpoint = find_checkpoint(args.resume_from_checkpoint, args.output_dir, job_id, args.world_size, strategy)
    if checkpoint:
        refuse_foreign_code(Path(checkpoint))
    else:
        refuse_finished(record.path, args.output_dir)

    # 4. Tokenizer, data, and the metric: if it is missing, now and not behind the training.
    if data_args.em_f1:
        load_metric()
    skeleton = empty_model(model_args, data_args)
    if model_args.loss == "chunked":
        check_head(skeleton)
    if options.values["activation_checkpointing"] and not skeleton.supports_gradient_checkpointing:
        what = f"{type(skeleton).__name__} cannot compute its blocks again"
        raise WorkshopError("--activation_checkpointing", what, "leave it out, or use FSDP's, in its config file")
    watchdog.beat("reading the data")
    tokenizer = load_tokenizer(model_args, data_args)
    check_model(skeleton, tokenizer, data_args.max_length)
    train_dataset, eval_dataset = load_squad(data_args, tokenizer, args)
    cut = questions_cut(train_dataset, eval_dataset)
    if cut["train"]:
        print_once(f"{cut['train']} of {len(train_dataset)} training questions were cut to --max_length")
    if options.fsdp_config is not None:
        check_wrap_classes(options.fsdp_config, options.values["fsdp_config"], skeleton)
    marker = marker_of(job_id, options, strategy, args.world_size, train_dataset)
    if checkpoint:
        check_same_training(checkpoint, marker)
    if rank() == 0:
        check_room(args.output_dir, options, skeleton, strategy, args.save_total_limit)
    del skeleton

    with sole_writer(job_id), record:
        # 5. Model and Trainer.
        step = read_marker(checkpoint)["step"] if checkpoint else 0
        if checkpoint:
            print_once(f"going on from step {step}: {checkpoint}")
        record.start(
            step,
            run_name=args.run_name,
            output_dir=args.output_dir,
            git=git,
            resumed_from=checkpoint,
            settings=options.settings(),
            train_size=len(train_dataset),
            eval_size=len(eval_dataset),
            questions_cut=cut,
        )
        watchdog.before_exit(lambda: finish(record.path, "failed", ENVIRONMENT))
        prepare_trackers(args, job_id)
        watchdog.beat("estimating memory")
        predict_memory(options, record)
        watchdog.beat("timing matrix products, memory and network")
        peak = matmul_peak(compute_dtype(options.values), args.device)
        rates = Rates(peak, memory_bandwidth(args.device), bus_bandwidth(record, args.device))
        watchdog.beat("loading the model")
        model = load_model(model_args, data_args, tokenizer, args.seed)
        if model_args.loss == "chunked":
            use_chunked_loss(model)
        flops = None
        try:
            flops = ModelFlops(model)
        except ValueError as error:
            record.content["missing"]["train.mfu_percent"] = str(error)
        # CheckpointCallback removes the older ones, once the new one is known to be complete
        save_total_limit = args.save_total_limit
        args.save_total_limit = None
        if fsdp:
            shard_on_cpu()
        watchdog.beat("trying the compiler")
        eager_reason = compile_or_eager(args)
        trainer = WorkshopTrainer(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            data_collator=collator(tokenizer, data_args),
        )
        samples_per_step = requested_train_size(options.values) / steps_per_epoch(trainer)
        # profiled steps are slower than others
        warm_up_steps = WARM_UP_STEPS + (PROFILED_STEPS if data_args.profile else 0)
        speed = TrainSpeedCallback(samples_per_step, trainer, warm_up_steps)
        utilisation = UtilisationCallback()
        trainer.add_callback(speed)
        trainer.add_callback(utilisation)
        trainer.add_callback(AuditCallback(trainer, options, data_args, record, eager_reason))
        trainer.add_callback(RecordCallback(record))
        trainer.add_callback(CheckpointCallback(save_total_limit, marker, trainer, speed, checkpoint))
        trainer.add_callback(StopCallback(stop, steps_per_epoch(trainer)))
        trainer.add_callback(FiniteLossCallback(trainer))
        trainer.add_callback(CompiledCallback())
        if data_args.profile:
            trainer.add_callback(ProfileCallback(trainer, record, job_id))
        trainer.add_callback(HeartbeatCallback())
        if not sys.stderr.isatty() and not args.disable_tqdm:
            trainer.pop_callback(ProgressCallback)
            trainer.add_callback(LogLinesCallback())

        # 6. Training, with an evaluation after each epoch.
        result = trainer.train(resume_from_checkpoint=checkpoint)
        record.measure_memory()
        work = speed.work(flops, peak)
        record.training(trainer.state.global_step, result.metrics, trainer.state.log_history, speed, utilisation, work)
        close_trackers(args, job_id, record.content["callbacks"])
        stop.end_training(trainer, record)

        # 7. The model.
        watchdog.beat("saving the model")
        if args.save_strategy == "no":
            print_once("model not saved (SAVE_STRATEGY=no)")
        else:
            with saving(Path(args.output_dir)):
                save_model(trainer, tokenizer, args.output_dir)

        # 8. Exact Match and F1.
        if data_args.em_f1:
            sharded = strategy == "DeepSpeed ZeRO-3" or bool(fsdp)
            with trainer.accelerator.autocast():  # around all tokens: 16-bit copies of the weights are made once
                scores = exact_match_and_f1(
                    trainer.model,
                    tokenizer,
                    eval_dataset,
                    data_args.em_f1_batch_size,
                    data_args.max_length,
                    args.device,
                    sharded,
                )
            print_once(f"exact_match {scores['exact_match']:.2f}  f1 {scores['f1']:.2f}")
            record.update(**scores)
        predict_time(options, record, rates, samples_per_step * trainer.state.global_step)  # no stop waits for it here
        record.measure_process_memory()  # saving and answers need memory, too
        if args.save_strategy == "no":
            remove_checkpoints_of_stops(args.output_dir)
    print_once(f"Run record: {record.path}")
    leave_process_group()
