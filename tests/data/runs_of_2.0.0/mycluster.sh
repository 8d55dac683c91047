# shellcheck shell=bash
# experiments/sites/example.sh of version 2.0.0, filled in.
# Copy this file to experiments/sites/mycluster.sh, fill it in, then choose it once for all experiments:
#     echo mycluster > experiments/site
# You can still give every value at submission:  BATCH_SIZE=8 sbatch baseline.slurm
# An afternoon needs only the decisions 1 to 6.

# --- 1 to 3. Slurm: submit.sh sets these variables, which sbatch reads. Before a bare sbatch, source this file.
export SBATCH_ACCOUNT="${SBATCH_ACCOUNT:-abc123}"  # sacctmgr show associations user=$USER format=account
export SBATCH_PARTITION="${SBATCH_PARTITION:-gpu}" # sinfo -s
# export SBATCH_TIMELIMIT="${SBATCH_TIMELIMIT:-00:20:00}" # the scripts ask for an hour; a reservation may end earlier

# --- 4. Python environment. This runs on the first node of each job; srun passes the environment on to the other nodes.
site_setup() {
  : # a test has no modules and no conda
}

# --- 5. Hugging Face cache, on a file system that all nodes share. Fill it on a login node, with the same HF_HOME:
#     HF_HOME=... python scripts/prefetch.py --model_name bigscience/bloom-560m --dataset squad
: "${HF_HOME:=$HOME/.cache/huggingface}"

# --- 6. GPUs of one node: submit.sh leaves out the experiments that need more on a node.
: "${GPUS_PER_NODE:=8}"

# ====== Only if needed ======

# --- More of Slurm
# export SBATCH_RESERVATION="${SBATCH_RESERVATION:-workshop}"
# export SBATCH_CONSTRAINT="${SBATCH_CONSTRAINT:-v100}"

# --- Jobs longer than the time limit: Slurm warns them in time. They save a checkpoint, and Slurm starts them again.
export SBATCH_SIGNAL="${SBATCH_SIGNAL:-B:USR1@120}" # seconds before the limit; saving a large model takes minutes
: "${REQUEUE:=1}" "${MAX_RESTARTS:=10}"
# export SBATCH_REQUEUE=1 # needed if "scontrol show config" shows JobRequeue = 0

# --- Ranks that may share a GPU, so that a job gets its ranks on fewer GPUs. Such a run has no speed.
# : "${RANKS_PER_GPU:=4}"

# --- Memory of one GPU in GiB. If it is set, a dry run shows whether a job fits.
: "${GPU_MEMORY:=32}"

# --- The Hub is never asked. Leave this line out if compute nodes have network access.
: "${HF_HUB_OFFLINE:=1}"

# --- Weights & Biases: runs with REPORT_TO=wandb stay offline. With WANDB_ONLINE=1, the job uploads them at its end.
# : "${REPORT_TO:=wandb}"
# : "${WANDB_ONLINE:=1}" # if nodes have network; needs the key of "wandb login" or experiments/wandb_key (chmod 600)

# --- Network between nodes. Find names with:  ip -brief address;  ibstat -l
# : "${NCCL_SOCKET_IFNAME:=ib0}"      # interface for NCCL's start-up and its TCP transport
# : "${GLOO_SOCKET_IFNAME:=ib0}"      # the same for gloo (CPU tensors)
# : "${NCCL_IB_HCA:=mlx5}"            # InfiniBand adapters: a prefix, or a list such as mlx5_0,mlx5_1
# Without this line, NCCL chooses the level itself. Use the line only if a bandwidth test needs it, and remove it first
# if a job over several nodes hangs: https://github.com/Lumi-supercomputer/LUMI-AI-Guide/pull/97
# : "${NCCL_NET_GDR_LEVEL:=PHB}"      # use GPUDirect RDMA if GPU and adapter belong to the same CPU
# : "${NCCL_ALGO:=Tree}"              # only for comparisons: NCCL's own choice is better in most cases
# : "${TORCH_NCCL_BLOCKING_WAIT:=1}"  # only for finding hangs: collectives block, and raise after their timeout

# --- Multi-node jobs begin with an all-reduce. They end with exit code 3 if its bus bandwidth is below this (in GB/s).
# 10 GbE reaches at most 1.25, and 25 GbE at most 3.1. For such networks, set a lower value, or 0 for no minimum.
: "${MIN_BANDWIDTH:=5}"
