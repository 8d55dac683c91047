#!/usr/bin/env bash
# Watch a job, or a run without Slurm, in the terminal:
#     experiments/watch.sh 4711            # Ctrl-C ends only this view; the job continues
#     experiments/watch.sh                 # your newest job of these experiments in the queue, otherwise the newest log
#     experiments/watch.sh --once 4711     # print one view and end, as into a pipe
# It asks Slurm for the state of the job, and reads the ends of the job's log and of its loggers' files. It does not
# start a step in the job (srun --overlap): a restarted job could get that step's number, and Slurm would end it.
set -euo pipefail +o posix # sh can be bash in POSIX mode

EXPERIMENTS_FOLDER=$(cd -P "$(dirname "${BASH_SOURCE[0]}")" && pwd)
ROOT=$(dirname "$EXPERIMENTS_FOLDER")
REFRESH=5 # seconds; the loggers write a sample every LOG_INTERVAL seconds, also 5 by default
WIDTH=80  # columns
# shellcheck source=experiments/load_site.sh
source "$EXPERIMENTS_FOLDER/load_site.sh" # only for job_fail; the view needs no site

# 1. Find the job

find_logs() { # JOB: print time and path of each log with this id. A run of submit.sh --snapshot also has its log here
  { find -L "$EXPERIMENTS_FOLDER" -name output -prune -o -path "*/log/*_$1.out" -printf '%T@ %p\n' || true; } 2>/dev/null | sort -n
}

newest_job() {
  local found
  found=$(timeout --foreground 20 squeue --me --noheader --format='%i %Z' 2>/dev/null |
    awk -v folder=" $EXPERIMENTS_FOLDER/" 'index($0, folder) { print $1 }' | sort -n | tail -n 1) || true
  if [[ -z $found ]]; then
    found=$(find_logs '*' | tail -n 1)
    found=${found##*_}
  fi
  printf '%s' "${found%.out}"
}

ask_slurm() { # set `state` and what belongs to it. It is empty for a job that is not in Slurm's queue
  local answer
  state="" reason="" nodes="" used="" left="" start=""
  if [[ $JOB = *[!0-9]* ]] || ! command -v squeue >/dev/null; then
    return 0
  elif answer=$(timeout --foreground 20 squeue --noheader --jobs="$JOB" --format='%T|%r|%N|%M|%L|%S|%Z' 2>&1); then
    IFS='|' read -r state reason nodes used left start folder <<<"$answer"
  elif [[ $answer != *"Invalid job id"* ]]; then
    state="unknown: Slurm does not answer"
  fi
}

ask_lock() { # set `state` for a run without Slurm, which holds a lock on its folder while it runs
  # Before the log's first line, our own lock could be in the way of the run's lock
  local -r run_dir=$folder/results/.$JOB
  if [[ -d $run_dir ]] && { ! grep -q "^job $JOB of " "$log" || ! flock --nonblock --shared "$run_dir" true; }; then
    state=running
  fi
}

# 2. The view

show_state() {
  case $state in
    "") echo "ended, ${summary:-without a summary: see the end of its log}" ;;
    running | unknown*) echo "$state" ;;
    PENDING) echo "PENDING ($reason)$([[ $start = N/A ]] || echo ", expected start $start")" ;;
    *) echo "$state for $used on $nodes, time left $left" ;;
  esac
}

show_progress() { # the lines "step 96 of 192 (50 %) after 21 s". The rate does not count the time before the first line
  awk -v runs="$runs" '/^resuming from step / { first = step = $4 + 0 }
    /^step [0-9]+ of [0-9]+ \(/ { if (++lines == 2) { first = step; began = now } step = $2; of = $4; now = $8 }
    /^stopped by [A-Z0-9]+ at step / { last = $6; of = $8 + 0; runs = "no" }
    /^status: completed/ { last = of }
    END {
      if (!last) last = step
      printf "step       %d of %d (%d %%)", last, of, 100 * last / of
      rate = now > began ? (step - first) / (now - began) : 0
      left = rate ? (of - step) / rate : 0
      if (rate) printf ", %.3g steps/s", rate
      if (left && runs == "yes") printf ", about %d:%02d min left", left / 60, left % 60
      print ""
    }' <<<"$text"
}

show_values() { # LABEL NAME COUNT: the last values of the Trainer with this name, the newest at the end
  local -r values=$(grep -o "'$2': '[^']*" <<<"$text" | cut -d"'" -f4 | tail -n "$3" | paste -sd' ')
  [[ -z $values ]] || printf '%-10s %s\n' "$1" "$values"
}

late_sample() { # FILE: print a text for the column of the load if the last sample is old
  local -r seconds=$(($(date +%s) - $(stat -c %Y "$1")))
  ((seconds <= 4 * REFRESH)) || echo "no sample for $seconds s"
}

ask_nodes() { # print the nodes of a Slurm job that do not answer Slurm, or that are down, draining or failing
  [[ -z $nodes ]] || timeout --foreground 20 sinfo --noheader --Node --nodes="$nodes" --format='%N %T' 2>/dev/null |
    awk '$2 ~ /[*]$/ { printf "%-20s does not answer (%s)\n", $1, $2; next }
      $2 ~ /^(down|drain|fail)/ { printf "%-20s is %s in Slurm\n", $1, $2 }' | sort -u
}

show_nodes() { # the last sample of each logger
  local -r problems=$(ask_nodes)
  local host hosts suffix log
  read -ra hosts < <(sed -n 's/^nodes: //p' <<<"$text")
  printf '\n%-20s %-8s %-24s %s\n' node "" "memory (MiB)" load
  [[ -z $problems ]] || echo "$problems"
  for host in "${hosts[@]}"; do
    ! grep -q "^$host .*not answer" <<<"$problems" || continue # its last sample would look as if it still answered
    suffix=$JOB$([[ ${#hosts[@]} = 1 ]] || echo "_$host")
    log=$folder/cpu_memory/cpu_memory_log_$suffix.txt
    tail -qn 2 "$log" | awk -v host="$host" -v late="$(late_sample "$log")" '
      NF == 4 && $1 ~ /^[0-9]/ { load = sprintf("%.0f %% of one core", $2); used = $3 }
      END { if (used) printf "%-20s %-8s %-24.0f %s\n", host, "CPU", used, late ? late : load }'
    # "time, GPU, name, memory in use, memory, power, load"; logs of version 1.0.0 have only the first five columns
    log=$folder/gpu_memory/gpu_memory_log_$suffix.csv
    tail -n 64 "$log" |
      awk -F', ' -v host="$host" -v late="$(late_sample "$log")" '
        (NF == 5 || NF == 7) && $4 ~ /[0-9]/ {
          if (!($2 in used)) gpus[++count] = $2
          used[$2] = $4 " of " $5
          load[$2] = $7 ~ /^[0-9]/ ? $7 " %" : ""
          power[$2] = $6 ~ /^[0-9]/ ? sprintf("%.0f W", $6) : ""
        }
        END {
          for (i = 1; i <= count; i++) {
            gpu = gpus[i]
            both = load[gpu] (load[gpu] && power[gpu] ? ", " : "") power[gpu]
            printf "%-20s %-8s %-24s %s\n", host, "GPU " gpu, used[gpu], late ? late : both
          }
        }'
  done 2>/dev/null
}

show() {
  echo "job $JOB${folder:+ in ${folder#"$ROOT"/}}"
  show_state
  if [[ -z $log ]]; then
    echo "log        none yet"
    return
  fi
  echo "log        log/${log##*/}, last line $(($(date +%s) - $(stat -c %Y "$log"))) s ago"
  if grep -qE '^(step [0-9]+ of [0-9]+ \(|stopped by [A-Z0-9]+ at step )' <<<"$text"; then
    show_progress
  elif [[ -z $summary ]]; then # leave out the Trainer's values, horizontal rules, and Slurm's messages except errors
    awk 'NF && !/^(=+$|[{])/ && (!/^(srun|slurmstepd): / || /: error: /) { line = $0 }
      END { print "last line  " line }' <<<"$text"
  fi
  show_values loss loss 1
  show_values "eval loss" eval_loss 5
  grep '^error: ' <<<"$text" | tail -n 1
  if [[ -n $summary ]]; then
    echo
    sed -n '/^status: /,/^=====/{/^=====/!p}' <<<"$text" # the summary, with the peaks of memory
  elif [[ $runs = yes ]]; then
    show_nodes
  fi
}

# 3. The command line, and the loop

once=no JOB=""
for argument in "$@"; do
  case $argument in
    --once) once=yes ;;
    --help | -h)
      sed -n '2,/^set/{/^set/d; s/^# \{0,1\}//; p}' "$0"
      exit
      ;;
    -*) job_fail "$argument" "unknown option" "see --help" ;;
    *)
      [[ -z $JOB ]] || job_fail "$argument" "only one job is allowed" "see --help"
      JOB=$argument
      ;;
  esac
done
: "${JOB:=$(newest_job)}"
if [[ ! $JOB =~ ^[A-Za-z0-9_-][A-Za-z0-9._-]{0,63}$ ]]; then # job.sh has the same rule
  job_fail "${JOB:-watch.sh}" "this is not the id of a job" "give the number that sbatch printed, or local-... of a run without Slurm"
fi
[[ -t 1 ]] || once=yes
trap 'echo; exit 0' INT

log="" folder="" clear=$'\e[2J'
while :; do
  ask_slurm
  if [[ -z $log ]]; then
    log=$(find_logs "$JOB" | tail -n 1 | cut -d' ' -f2-)
  fi
  if [[ -n $log ]]; then
    folder=$(dirname "$(dirname "$log")")
  elif [[ -z $state ]]; then
    job_fail "$JOB" "no job in Slurm's queue and no log in experiments/ has this id" "squeue --me lists your jobs"
  fi
  if [[ -z $state ]]; then
    ask_lock
  fi
  # The last attempt in the last megabyte of the log
  text=$([[ -z $log ]] || tail -c 1000000 "$log" | tr -d '\0' | tac | sed "/^job $JOB of /q" | tac) || true
  summary=$(grep '^status: ' <<<"$text" | tail -n 1) || true
  [[ -z $summary || $state != unknown* ]] || state="" # it has ended, although Slurm does not say so
  [[ -z $summary && $state = @(running|RUNNING|unknown*) ]] && runs=yes || runs=no
  view=$(show | fold -s -w "$WIDTH") || true
  if [[ $once = yes ]]; then
    printf '%s\n' "$view"
    exit
  fi
  read -r rows _ < <(stty size </dev/tty) || rows=0 # height of the terminal; 0 if unknown
  if ((rows > 2 && $(wc -l <<<"$view") >= rows)); then
    view=$(head -n $((rows - 2)) <<<"$view")$'\n'"... $0 --once $JOB prints all lines"
  fi
  # Write over the old view instead of clearing it first, which would flicker: \e[H goes to the first line, \e[K clears
  # the rest of a line, and \e[J also all lines below
  printf '%s\e[H%s\e[J\n' "$clear" "${view//$'\n'/$'\e[K\n'}"
  clear=""
  [[ -n $state ]] || exit 0
  sleep "$REFRESH"
done
