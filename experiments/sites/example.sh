# shellcheck shell=bash
# Copy this file to experiments/sites/<your cluster>.sh, fill it in, then choose it once for all experiments:
#     echo <your cluster> > experiments/site
# Every value can still be given at submission:  BATCH_SIZE=8 sbatch baseline.slurm

# --- Slurm, read by sbatch at submission. submit.sh does this for you; for a bare sbatch, source this file first.
export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-CHANGE_ME}"     # sacctmgr show associations user=$USER format=account
export SBATCH_PARTITION="${SBATCH_PARTITION:-CHANGE_ME}" # sinfo -s
# export SBATCH_RESERVATION="${SBATCH_RESERVATION:-workshop}"
# export SBATCH_CONSTRAINT="${SBATCH_CONSTRAINT:-v100}"
# export SBATCH_TIMELIMIT="${SBATCH_TIMELIMIT:-00:20:00}" # instead of the scripts' hour: a job must end before a reservation does

# --- Jobs longer than the time limit: warned in time they save a checkpoint, and are submitted again by themselves.
# export SBATCH_SIGNAL="${SBATCH_SIGNAL:-B:USR1@120}" # seconds before the limit; a large model saves for minutes
# : "${REQUEUE:=1}" "${MAX_RESTARTS:=10}"
# export SBATCH_REQUEUE=1 # where scontrol show config says JobRequeue = 0

# --- Python environment, on the first node of each job; srun passes it on to the others.
site_setup() {
  module purge
  # CUDA comes with the packages. For a V100, or a driver older than 580, install this build into the environment:
  #     python -m pip install torch==2.13.0+cu126 --index-url https://download.pytorch.org/whl/cu126
  # module load gcc  # 10 or newer, for torch.compile and DeepSpeed's own AdamW
  # module load cuda # for the latter on a GPU: the major version of torch's CUDA
  # shellcheck source=/dev/null
  source "$HOME/miniforge3/etc/profile.d/conda.sh"
  conda activate deepspeed-finetune
  # or a virtual environment:  source "$ROOT/.venv/bin/activate"
}

# --- GiB of one GPU: a dry run says whether a job will fit.
# : "${GPU_MEMORY:=32}"

# --- Hugging Face cache, on a file system that all nodes see. Fill it on a login node, with the same HF_HOME:
#     HF_HOME=... python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad
: "${HF_HOME:=$HOME/.cache/huggingface}"
: "${HF_HUB_OFFLINE:=1}" # compute nodes without network: never ask the Hub. Leave it out where they have one.

# --- Weights & Biases: runs with REPORT_TO=wandb stay offline, and the job uploads them at its end where it has network.
# : "${REPORT_TO:=wandb}"
# : "${WANDB_ONLINE:=1}" # with the key from "wandb login", or from experiments/wandb_key (chmod 600, never in git)

# --- Network between nodes. Find names with:  ip -brief address;  ibstat -l
# : "${NCCL_SOCKET_IFNAME:=ib0}"      # interface for NCCL's start-up and its TCP transport
# : "${GLOO_SOCKET_IFNAME:=ib0}"      # the same for gloo (CPU tensors)
# : "${NCCL_IB_HCA:=mlx5}"            # InfiniBand adapters: a prefix, or a list such as mlx5_0,mlx5_1
# : "${NCCL_NET_GDR_LEVEL:=PHB}"      # GPUDirect RDMA where GPU and adapter are at the same CPU
# : "${NCCL_ALGO:=Tree}"              # only to compare: NCCL chooses by itself, and better in most cases
# : "${TORCH_NCCL_BLOCKING_WAIT:=1}"  # collectives block and raise after their time-out: for hunting hangs only

# --- Multi-node jobs begin with an all-reduce; below this bus bandwidth (GB/s) they end with exit code 3. 10 GbE has at best
# 1.25, 25 GbE 3.1: lower it there, 0 for no test of the result.
: "${MIN_BANDWIDTH:=5}"
