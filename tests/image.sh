#!/usr/bin/env bash
# Prove environment/ and CONTAINER as an ordinary user, on Debian as root, in about a quarter of an hour:
#     make test-image
# 1. The folder of `make carry` installs, and the demo trains, without a network.
# 2. install.sh fills an image of Debian's base. On a Slurm of two nodes, jobs in this image train on one node and on
#    two, one is stopped and requeued, and one loses a rank. Losses equal those without a container.
# debootstrap, ch-run (charliecloud-runtime) and a cluster (docs/practice-cluster.md) are needed, but no registry.
set -euo pipefail

repository=$(cd -P "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
for program in debootstrap ch-run slurmctld unshare; do
  PATH=$PATH:/usr/sbin command -v $program >/dev/null || { echo "skipped: there is no $program" && exit; }
done
folder=$(mktemp -d /var/tmp/image-XXXX) # ch-run mounts TMPDIR at /tmp, so below /tmp the image would not see it
chmod 755 "$folder"
as_user() { # run the rest of the line as nobody, without the caller's environment
  env -i USER=nobody HOME="$folder/user" PATH=/usr/sbin:/usr/bin:/sbin:/bin setpriv --reuid=nobody --regid=nogroup --clear-groups "$@"
}
cluster() { (cd "$folder/user/workshop" && as_user python3 scripts/cluster.py "$1" --folder "$folder/user/slurm"); }
finish() {
  [[ ! -d $folder/user/slurm ]] || cluster stop || true
  rm -rf "$folder"
}
trap finish EXIT

echo '1. The carried folder'
MODELS=tiny-bloom DATASET=$repository/data/squad_sample.json PYTHON=$repository/.venv/bin/python "$repository/environment/carry.sh" "$folder/carry" >"$folder/log"
mkdir "$folder/user"
chown nobody:nogroup "$folder/user"
(
  cd "$folder/carry"
  # shellcheck disable=SC2016
  as_user unshare --user --map-root-user --net sh -euc '
    ip link set lo up
    ! getent hosts pypi.org
    sha256sum --check --quiet SHA256SUMS
    git clone --quiet workshop.bundle ~/workshop
    ~/workshop/environment/install.sh ~/environment --quiet --no-index --find-links wheels
    PATH=$HOME/environment/bin:$PATH python ~/workshop/scripts/demo.py'
)

echo '2. The image'
image=$folder/image
debootstrap --variant=minbase --include=python3-venv bookworm "$image" >"$folder/log"
mkdir -p "$image/usr/src/workshop/environment" "$image/mnt/0"
cp "$repository"/{requirements,constraints}.txt "$image/usr/src/workshop"
cp "$repository/environment/install.sh" "$image/usr/src/workshop/environment"
USER=root PATH=/usr/bin:/bin ch-run --write --bind="$folder/carry:/mnt/0" "$image" -- \
  /usr/src/workshop/environment/install.sh /opt/workshop --quiet --no-index --find-links /mnt/0/wheels
as_user python3 -m venv "$folder/user/host"
as_user "$folder/user/host/bin/pip" install --quiet --no-index --find-links "$folder/carry/wheels" -r "$folder/user/workshop/requirements-host.txt"

cluster start
cat >"$folder/jobs.sh" <<'JOBS'
set -euo pipefail
image=$1 two=deepspeed-multi-node/2_nodes
export OMP_NUM_THREADS=1 EM_F1=False TRAIN_SIZE=96 EVAL_SIZE=16 NUM_EPOCHS=12 GRAD_ACC=1 SAVE_STRATEGY=epoch SAMPLES_PER_GPU=48
submit() { # FOLDER VARIABLE=VALUE...
  (cd "experiments/$1" && env "${@:2}" sbatch --parsable ./*.slurm)
}
host=PATH=$HOME/host/bin:/usr/bin:/bin # a python that has only requirements-host.txt
in_image() { echo "CONTAINER=ch-run --cd=$PWD/$1 --bind=/var/tmp --set-env=PATH=/opt/workshop/bin:/usr/bin:/bin $image --"; }
submit_in_image() { submit "$1" "$host" "$(in_image "experiments/$1")" "${@:2}"; }
log_of() { cat experiments/{*,*/*}/log/*_"$1".out 2>/dev/null; }
wait_for() { # JOB CONDITION
  local -r deadline=$((SECONDS + 900))
  until "$2" "$1"; do
    ((SECONDS < deadline)) || { log_of "$1"; echo "error: job $1: $2 is not true after 15 minutes" && exit 1; }
    sleep 1
  done
}
is_training() { [[ $(log_of "$1") = *"'eval_loss'"* ]]; }
has_ended() { [[ $(squeue --noheader --states=all --job="$1" --format=%T) =~ COMPLETED|FAILED|CANCELLED ]]; }
kill_rank_1() {
  local process
  for process in /proc/[0-9]*; do
    if tr '\0' '\n' 2>/dev/null <"$process/environ" | grep -cxE "SLURM_JOB_ID=$1|RANK=1" | grep -q 2; then
      kill -KILL "${process#/proc/}"
    fi
  done
}

env "$host" "$(in_image "")" python scripts/preflight.py --quick
plain=$(submit $two "PATH=$HOME/environment/bin:/usr/bin:/bin")
wait_for "$plain" has_ended
one=$(submit_in_image baseline SAVE_STRATEGY=no)
wait_for "$one" has_ended
mkdir "$HOME/temporary"
stopped=$(submit_in_image $two REQUEUE=1 TMPDIR="$HOME/temporary" DATA_WORKERS=1) # the workers need TMPDIR
wait_for "$stopped" is_training
scancel --batch --signal=USR1 "$stopped"
wait_for "$stopped" has_ended
killed=$(submit_in_image $two NUM_EPOCHS=10000)
wait_for "$killed" is_training
kill_rank_1 "$killed"
wait_for "$killed" has_ended
python3 - experiments/baseline/results/"$one".json experiments/$two/results/{"$plain","$stopped","$killed"}.json <<'CHECK'
import json, pathlib, sys
paths = list(map(pathlib.Path, sys.argv[1:]))
one, plain, stopped, killed = (json.loads(path.read_text()) for path in paths)
ends = [json.loads((path.parent / "jobs" / path.name).read_text())["attempts"] for path in paths]
assert [attempts[-1]["status"] for attempts in ends] == ["completed", "completed", "completed", "failed"], ends
assert plain["container"] is None and all("ch-run" in each["container"] for each in (one, stopped, killed))
assert (stopped["attempt"], ends[2][0]["exit_code"]) == (2, 75), ends[2]
losses = [[each["loss"] for each in record["eval"]] for record in (plain, stopped)]
assert losses[0] == losses[1] and plain["train"]["loss_mean"] == stopped["train"]["loss_mean"], losses
assert ends[3][-1]["reason"].startswith("rank 1 on node"), ends[3]
print("as without a container, bit for bit:", *losses[1])
CHECK
! pgrep --euid "$(id -u)" --full scripts/train.py
JOBS
(cd "$folder/user/workshop" && as_user python3 scripts/cluster.py shell --folder "$folder/user/slurm" <<<"exec bash $folder/jobs.sh $image")
echo 'passed'
