# shellcheck shell=bash
# Knobs of this experiment. A value that you give at submission wins, then the site's value, then the value here.
: "${LOSS:=chunked}"
: "${PADDING:=longest}"
: "${EM_F1:=False}"
: "${BF16:=True}"
: "${TORCH_COMPILE:=True}"
: "${SAMPLING:=group_by_length}"
: "${SAVE_STRATEGY:=no}" # this measures training, not the file system
