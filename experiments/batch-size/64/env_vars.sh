# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${TRAIN_SIZE:=1024}"
: "${EM_F1:=False}"
: "${NUM_EPOCHS:=3}"
# The global batch is 64, as on 16 GPUs without accumulation.
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=16}"
: "${LEARNING_RATE:=${SITE_LEARNING_RATE:-5e-5}}"
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
