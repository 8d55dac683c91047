# shellcheck shell=bash
# Any machine, with or without a GPU, and no network: tiny-bloom on the bundled sample, short runs on the CPU.
#     cd experiments/baseline && SITE=laptop bash baseline.slurm

site_setup() {
  # the environment that make demo created, if it is complete; otherwise the python that is active
  if [[ -f $ROOT/.venv/installed ]]; then PATH=$ROOT/.venv/bin:$PATH; fi
}

: "${MODEL_NAME:=tiny-bloom}"
: "${DATASET:=$ROOT/data/squad_sample.json}"
# tiny-bloom starts from random weights, so its learning rate is large; these experiments scale it, and need batches of 256
if [[ ${EXPERIMENT:-} = experiments/batch-size/* ]]; then
  : "${SITE_LEARNING_RATE:=2e-3}" "${TRAIN_SIZE:=256}" "${EVAL_SIZE:=64}" "${NUM_EPOCHS:=12}"
else
  : "${LEARNING_RATE:=2e-3}" "${TRAIN_SIZE:=128}" "${EVAL_SIZE:=32}"
fi
: "${SITE_SAMPLES_PER_GPU:=16}"                                                                     # weak scaling: 16 ranks must find enough questions in the sample
: "${SITE_VOCAB_SIZE:=1024}" "${SITE_HIDDEN_SIZE:=64}" "${SITE_NUM_HEADS:=4}" "${SITE_FF_DIM:=128}" # custom GPT
# The efficiency experiments are about padding themselves
if [[ ${EXPERIMENT:-} != experiments/efficiency/* ]]; then
  : "${PADDING:=longest}"
fi
: "${REQUIRE_GPU:=0}"
# Two ranks need two GPUs, so without a choice of the caller a laptop's GPU stays hidden, and all ranks are on the CPU
: "${CUDA_VISIBLE_DEVICES=}"
: "${LOG_INTERVAL:=1}" # seconds between two samples of the memory logs; runs are short here
