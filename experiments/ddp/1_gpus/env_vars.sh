# shellcheck shell=bash
# Knobs of this experiment. A value that you give at submission wins, then the site's value, then the value here.
: "${TRAIN_SIZE:=512}" # 32 steps of 16; accelerate would fill an incomplete last step with repeated questions
: "${EM_F1:=False}"
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=4}"       # the global batch is 16 on any number of GPUs: 4 x 4 x 1
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
