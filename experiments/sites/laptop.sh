# shellcheck shell=bash
# A site for any machine, with or without a GPU or network. Runs are short and train tiny-bloom on the CPU, on the
# bundled sample.
#     cd experiments/baseline && SITE=laptop bash baseline.slurm

site_setup() {
  # Use the environment that make demo created, if it is complete; otherwise the active python
  if [[ -f $ROOT/.venv/installed ]]; then PATH=$ROOT/.venv/bin:$PATH; fi
}

# Experiments of your own keep their model, data, sizes, learning rate and padding
if [[ ${EXPERIMENT:-} != experiments/own* ]]; then
  : "${MODEL_NAME:=tiny-bloom}"
  : "${DATASET:=$ROOT/data/squad_sample.json}"
  # tiny-bloom starts from random weights and needs a large learning rate. The batch-size experiments scale this rate
  # themselves, and need at least 256 questions for their largest batch
  if [[ ${EXPERIMENT:-} = experiments/batch-size/* ]]; then
    : "${SITE_LEARNING_RATE:=2e-3}" "${TRAIN_SIZE:=256}" "${EVAL_SIZE:=64}" "${NUM_EPOCHS:=12}"
  else
    : "${LEARNING_RATE:=2e-3}" "${TRAIN_SIZE:=128}" "${EVAL_SIZE:=32}"
  fi
  # The efficiency experiments choose the padding themselves
  if [[ ${EXPERIMENT:-} != experiments/efficiency/* ]]; then
    : "${PADDING:=longest}"
  fi
fi
# Weak scaling: the sample must have enough questions for 16 ranks
: "${SITE_SAMPLES_PER_GPU:=16}"
# A small custom GPT
: "${SITE_VOCAB_SIZE:=1024}" "${SITE_HIDDEN_SIZE:=64}" "${SITE_NUM_HEADS:=4}" "${SITE_FF_DIM:=128}"
: "${REQUIRE_GPU:=0}"
# Hide the GPUs unless the caller chooses some. Two ranks would need two GPUs, so by default all ranks use the CPU
: "${CUDA_VISIBLE_DEVICES=}"
: "${LOG_INTERVAL:=1}" # seconds between two samples of the memory logs; short, because the runs are short
