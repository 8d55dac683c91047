"""Fine-tune a causal language model on SQuAD with the Hugging Face Trainer: plain, with DDP, DeepSpeed ZeRO or FSDP.

On a laptop, no network needed (TRAIN_SIZE and EVAL_SIZE fit the bundled sample):
    python scripts/train.py --model_name tiny-bloom --dataset data/squad_sample.json --train_size 256 --eval_size 64

BLOOM-560m on one GPU, then with ZeRO-1, then on two GPUs with ZeRO-2 and CPU offload:
    python scripts/train.py
    python scripts/train.py --deepspeed ds_configs/zero1.json
    python scripts/launch.py --nproc-per-node=2 scripts/train.py --deepspeed ds_configs/zero2_cpu_offload.json

With FSDP on two GPUs: FULL_SHARD, or a strategy of the folder fsdp_configs:
    python scripts/launch.py --nproc-per-node=2 scripts/train.py --fsdp
    python scripts/launch.py --nproc-per-node=2 scripts/train.py --fsdp --fsdp_config fsdp_configs/shard_grad_op.json

Your own data and model, going on after an interruption:
    python scripts/train.py --model_name ./my-model --dataset my.json --train_size 1000 --resume_from_checkpoint
"""

from build_ops import check_compiler
from config import parse_command_line
from job.git_state import git_state
from parallel.distributed import local_world_size, prepare_environment, rank, run_and_exit, world_size
from parallel.ds_config import check_ds_config
from parallel.fsdp_config import check_fsdp_config
from training.stopping import StopRequest


def main() -> None:
    stop = StopRequest()
    stop.listen()

    # 1. Knobs: flags, variables, config files. A mistake ends the run here, before anything is written.
    options = parse_command_line(__doc__)
    deepspeed = options.values["deepspeed"]
    fsdp = options.values["fsdp"]
    prepare_environment(shards=bool(deepspeed or fsdp))
    if deepspeed:
        options.deepspeed_config = check_ds_config(deepspeed)
        check_compiler(options.deepspeed_config)
    if fsdp:
        fsdp_file = options.values["fsdp_config"]
        options.fsdp_config = check_fsdp_config(fsdp, fsdp_file, world_size(), local_world_size())

    # Until its exec, git is counted with all the memory of this process: now that is small
    git = git_state() if rank() == 0 else None

    # Models and the Trainer take seconds to import: not before a mistake above has been told
    from training.run import run

    run(options, stop, git)


if __name__ == "__main__":
    run_and_exit(main)
