# shellcheck shell=bash
# Knobs of this experiment. A value given at submission has priority, then the site's value, then the value here.
: "${TRAIN_SIZE:=512}" # 32 steps of 16 questions; accelerate would repeat questions to fill an incomplete last step
: "${EM_F1:=False}"
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=1}"       # the global batch is 16 on any number of GPUs: 4 x 1 x 4
: "${SAVE_STRATEGY:=no}" # measure the training, not the file system
