"""The frame of a training run: its settings, process group, checkpoint, checks and run record, and how it ends.

train.py shows the training itself. Participants of the workshop need not read this file.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase, TrainingArguments

from data_loader import Data
from distributed import watchdog
from distributed.collectives import broadcast_from_rank_0, local_world_size, print_once, rank, world_size
from distributed.config_file import read_config_file, start_process_group
from distributed.fsdp_config import shard_on_cpu
from distributed.process_group import leave_process_group, prepare_environment
from distributed.strategy import Strategy, choose_strategy
from distributed.tensor_parallel import check_saving_flags
from guard.checkpoints import (
    check_contents,
    check_same_training,
    find_checkpoint,
    forbid_code_in_checkpoints,
    keep_global_batch,
    read_marker,
    remove_stop_checkpoints,
    training_identity,
)
from guard.preconditions import check_room, check_saving, check_trainable
from guard.silent_faults import check_weights
from guard.stopping import StopRequest
from measure.energy import EnergyMeter
from measure.exact_match import check_references
from measure.flops import ModelFlops, matmul_peak, model_flops
from measure.measured_memory import record_process_peaks
from model import build_meta_model
from models.lora import add_adapters
from records.run_environment import new_job_id
from records.writer import RunRecord
from settings.command_line import parse_command_line
from settings.precision import DTYPES
from settings.settings import Settings
from shared.hub import check_files, draw_bars_on_terminals_only
from shared.tracker_setup import close_trackers, prepare_trackers
from tasks import TRAINED_ON, task_of
from tasks.task import Task


@dataclass(frozen=True, kw_only=True)
class Start:
    """Facts of a training run that are known before its data is loaded.

    args: built from the settings. checkpoint: the folder to resume from, None for a new training. meta_model: the
    model on PyTorch's meta device, which has shapes but no memory for weights.
    """

    settings: Settings
    args: TrainingArguments
    job_id: str
    output_dir: str
    strategy: Strategy
    stop: StopRequest
    record: RunRecord
    checkpoint: str | None
    meta_model: PreTrainedModel

    def check_model(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Raise WorkshopError (exit code 2) if the model cannot be trained with these settings."""
        check_trainable(self.settings, self.args, self.meta_model, tokenizer)

    @contextlib.contextmanager
    def recorded(self, tokenizer: PreTrainedTokenizerBase, data: Data) -> Iterator["Run"]:
        """Check the data, lock the output folder, and write the run record, which also says how the body ended.

        Raise WorkshopError if the checkpoint is of another training, or if there is no room for new checkpoints.
        """
        task = task_of(data.train.column_names)
        given = self.settings.data
        effective = replace(
            given,
            train_size=len(data.train),  # it may have been "all"
            eval_size=len(data.evaluation),
            labels=given.labels or task.labels,
            em_f1=task.em_f1 if given.em_f1 is None else given.em_f1,
        )
        settings = replace(self.settings, data=effective)
        identity = training_identity(self.job_id, settings, self.strategy.name, self.args.world_size, data.train)
        if self.checkpoint:
            check_same_training(self.checkpoint, identity)
        check_room(self.output_dir, settings, self.meta_model, self.strategy, self.args.save_total_limit or 0)
        unfair_questions = None
        if effective.em_f1:
            unfair_questions = check_references(tokenizer, data.evaluation, effective.max_length)
        with self.record:
            if not self.checkpoint:
                self.record.refuse_to_overwrite()  # again: another run may have ended just before this run had the lock
            self.start_record(settings, {"train": data.train, "eval": data.evaluation}, unfair_questions)
            watchdog.before_exit(self.record.close_as_hung)
            if rank() == 0:
                self.record.list_left_out(data.left_out)
            prepare_trackers(self.args, self.job_id)
            run = Run(
                **vars(self) | {"settings": settings},
                task=task,
                identity=identity,
                flops=model_flops(self.meta_model, effective.max_length, self.record),
                peak=matmul_peak(DTYPES[settings.precision], self.args.device),
                energy=EnergyMeter(),
            )
            watchdog.progress("loading the model")
            yield run
            record_process_peaks(self.record)  # again after the training: saving and answering also need memory
            run.energy.record_kwh(self.record)
            if self.args.save_strategy == "no":
                # A stop saves a checkpoint even with SAVE_STRATEGY=no. Remove it now that the run has completed
                remove_stop_checkpoints(self.output_dir)
            self.stop.ignore_signals()  # the run has completed, so a late signal must not change its exit code
        print_once(f"Run record: {self.record.path}")
        leave_process_group()

    def start_record(
        self, settings: Settings, questions: dict[str, Dataset], unfair_questions: dict[str, int] | None
    ) -> None:
        first_step = 0
        if self.checkpoint:
            saved = read_marker(self.checkpoint)
            first_step = saved["step"]
            print_once(f"resuming from step {first_step}: {self.checkpoint}")
            if saved["world_size"] != self.args.world_size:
                print_once(
                    f"resuming on {self.args.world_size} rank(s), the checkpoint is of {saved['world_size']}: sums are "
                    "rounded in another order, and random numbers, such as those of dropout, differ"
                )
        self.record.start(
            first_step,
            run_name=self.args.run_name,
            output_dir=self.output_dir,
            resumed_from=self.checkpoint,
            settings=settings.recorded(),
            origins=settings.origins,
            kind=task_of(questions["train"].column_names).name,
            train_size=len(questions["train"]),
            eval_size=len(questions["eval"]),
            questions_cut={part: sum(rows["cut"][:]) for part, rows in questions.items()},
            answers_cut={part: sum(rows["answer_cut"][:]) for part, rows in questions.items()},
            unfair_questions=unfair_questions,
            configs={
                "model": self.meta_model.config.to_diff_dict(),
                "deepspeed": settings.deepspeed_config,
                "fsdp": settings.fsdp_config,
            },
        )


@dataclass(frozen=True, kw_only=True)
class Run(Start):
    """A training run whose record has begun. Its settings have the sizes of the data as numbers.

    task: the kind of its data. identity: the description of the training in each checkpoint. flops: operations per
    token, None if unknown. peak: the most operations per second that one rank can do.
    """

    task: Task
    identity: dict
    flops: ModelFlops | None
    peak: float
    energy: EnergyMeter

    def prepare_trainer(self, model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> None:
        """Check that the model can be saved, prepare accelerate for sharding, and start to count energy."""
        setattr(model.config, TRAINED_ON, self.task.name)
        check_saving(model, tokenizer)
        model.generation_config.eos_token_id = self.task.ends(tokenizer)
        if self.settings.trainer.fsdp or self.strategy.degrees.tensor > 1:
            shard_on_cpu()  # without this, accelerate silently uses DDP if there is no GPU
        self.energy.start()  # it counts the joules of the GPUs from here to the end of the run

    def end_training(self, trainer: Any) -> None:
        """Complete the trackers. After a stop, save a checkpoint and exit with code 75. Collective.

        trainer: a WorkshopTrainer, which saves the checkpoint.
        """
        close_trackers(self.args, self.job_id, self.record.content["callbacks"])
        self.stop.save_and_exit_if_asked(trainer, self.record, self.energy)
        check_weights(trainer.model, trainer.state.global_step)
        watchdog.progress("saving the model")


def start_run(description: str) -> Start:
    """Read and check the settings, start the process group, find the checkpoint, and build the model without weights.

    description: the text of --help. Raise WorkshopError for a user's mistake, before the run writes anything.
    """
    # Handle Ctrl-C and the signals of Slurm. During the training, a signal saves a checkpoint at the end of the step
    # and ends the run with exit code 75. Before and after the training, a signal ends the run at once.
    stop = StopRequest()
    stop.install_handlers()
    draw_bars_on_terminals_only()
    settings = parse_command_line(description)
    prepare_environment(shards=bool(settings.trainer.deepspeed or settings.trainer.fsdp))
    job_id = new_job_id()  # JOB_ID if it is set, otherwise Slurm's id, otherwise a new id
    # If Slurm has restarted this job on another number of ranks, the accumulation keeps the global batch
    settings = keep_global_batch(settings, settings.trainer.output_dir or f"output/{job_id}", job_id, world_size())
    print_once("\n".join(settings.knob_lines()))  # each knob with its source: a flag, the site, config.py, ...
    settings = read_config_file(settings, world_size(), local_world_size())
    check_saving_flags(settings)
    strategy = choose_strategy(settings, world_size())
    print_once(strategy.line)
    # From here on, a rank that hangs for --ddp_timeout seconds ends the run, and the log names this rank. PyTorch's own
    # time-outs, which do not name the rank, come later
    args = start_process_group(settings, ddp_timeout=watchdog.start(settings.trainer.ddp_timeout))
    # Each rank has made up an id of its own, and the process group is the first way to agree. With two ids, each rank
    # would save its part of a checkpoint in another folder
    job_id = broadcast_from_rank_0(job_id)
    args.output_dir = output_dir = settings.trainer.output_dir or f"output/{job_id}"
    record = RunRecord(job_id, output_dir)
    # A checkpoint is a pickle, and loading a pickle can run code. From here on, a file with code does not load
    forbid_code_in_checkpoints(with_deepspeed=settings.deepspeed_config is not None)
    checkpoint = broadcast_from_rank_0(find_checkpoint(args.resume_from_checkpoint, output_dir, job_id))
    if not checkpoint:
        record.refuse_to_overwrite()
    watchdog.progress("reading the data")  # the watchdog treats a rank without progress for --ddp_timeout as hung
    meta_model = build_meta_model(settings.model)
    if settings.model.lora_rank:
        add_adapters(meta_model, settings.model.lora_rank)
    if checkpoint:
        check_files(checkpoint)
        check_contents(checkpoint, meta_model)
    return Start(
        settings=settings,
        args=args,
        job_id=job_id,
        output_dir=output_dir,
        strategy=strategy,
        stop=stop,
        record=record,
        checkpoint=checkpoint,
        meta_model=meta_model,
    )
