# shellcheck shell=bash
# Knobs of this experiment. A value given at submission comes first, then one of the site file.
export MODEL_NAME=custom-gpt # what this experiment is about, so not a knob: BLOOM cannot be cut like this
export TENSOR_PARALLEL=2     # nor is this one
: "${VOCAB_SIZE:=${SITE_VOCAB_SIZE:-50000}}"
: "${HIDDEN_SIZE:=${SITE_HIDDEN_SIZE:-2048}}"
: "${NUM_LAYERS:=3}"
: "${NUM_HEADS:=${SITE_NUM_HEADS:-16}}"
: "${FF_DIM:=${SITE_FF_DIM:-8192}}"
: "${SEQ_LENGTH:=512}"
: "${NUM_EPOCHS:=5}"
: "${BATCH_SIZE:=1}"
: "${GRAD_ACC:=4}" # the global batch is 4 in all of this family: 1 x 4, as both GPUs compute the same questions
: "${TRAIN_SIZE:=500}"
: "${EVAL_SIZE:=100}"
: "${LABELS:=answer}"    # only answer and EOS count in the loss
: "${SAVE_STRATEGY:=no}" # nothing else goes with a model that is cut; its weights are saved at the end
: "${EM_F1:=False}"
