# shellcheck shell=bash
# Knobs of this experiment. A value given at submission comes first, then one of the site file.
: "${BATCH_SIZE:=4}"
: "${GRAD_ACC:=1}"       # the global batch is 16 on any number of GPUs: 4 x 1 x 4
: "${TRAIN_SIZE:=512}"   # 32 steps of 16 in each epoch; of another number accelerate would fill the last step up
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
: "${EM_F1:=False}"
