#!/bin/sh
# WRN-16-4 from a prior on one GPU, in calls of less than ten minutes, each of which may be repeated. First, from ../priors:
# `sh gpu.sh site` and `sh gpu.sh data PART`.
#   sh gpu.sh learn SECONDS PROCESS   learn the prior PRIOR, in the background; with more seconds it goes on later. START is a prior
#                                     whose network it begins with; LIMIT are the seconds of this call
#   sh gpu.sh warm ARGUMENTS…         compile what `full ARGUMENTS…` will run and time six steps, in the background
#   sh gpu.sh log                     the last lines of all logs; results to OUT
#   sh gpu.sh wait SECONDS            until learning has ended, or so long; then as log
#   sh gpu.sh heads [--judge]         the logits alone: all arms on validation images, or the best per ε on the test set
#   sh gpu.sh full SECONDS ARGUMENTS… private.py with these arguments; kept after so many seconds, to go on with the same call
# With SCRATCH=" " `full` takes no prior. PYTHON=python3 by default. KEEP (/tmp/priors) is kept between calls; results are copied to
# OUT. COMMIT is written in rows.
set -u
KEEP=${KEEP:-/tmp/priors}
DATA=${DATA:-$KEEP/cifar10}
OUT=${OUT:-$KEEP/out}
TOY=${TOY:-}
PRIOR=${PRIOR:-$KEEP/wide/wide.npz}
python=${PYTHON:-python3}
here=experiments.leaderboard.wide
folder=$KEEP/wide
mkdir -p "$folder/log" "$folder/work" "$OUT"
for file in carry/wide*.npz carry/wide*.safetensors; do # priors of earlier calls, and what learning goes on from
    [ -e "$file" ] && [ ! -e "$folder/${file#carry/}" ] && cp "$file" "$folder/"
done
PYTHONPATH="$PWD/src:$PWD:$KEEP/site"
DPIVON_COMMIT=${COMMIT:-}
export DPIVON_COMMIT PYTHONPATH PYTHONUNBUFFERED=1 DPIVON_CONV_KERNELS=1
export TORCHINDUCTOR_CACHE_DIR="$KEEP/inductor" TRITON_CACHE_DIR="$KEEP/triton"

results() { # tables, logs, the prior, and what learning goes on from
    cp "$folder"/*.csv "$PRIOR" "${PRIOR%.npz}.state.safetensors" "$OUT" 2>/dev/null
    for file in "$folder"/log/*.log; do echo "== $file" && cat "$file"; done >"$OUT/wide-log.txt" 2>/dev/null
}
code() { # a copy: the next call's transfer must not change what runs in the background
    rm -rf "$folder/code-$1" && mkdir -p "$folder/code-$1" && cp -r src experiments "$folder/code-$1/"
    cd "$folder/code-$1" || exit 1
    PYTHONPATH="$PWD/src:$PWD:$KEEP/site"
}
tails() { for file in "$folder"/log/*.log; do echo "== $file" && tail -n 4 "$file"; done; }

case ${1:-} in
learn)
    start=${START:+--start $START}
    code learn
    # shellcheck disable=SC2086  # flags or none
    setsid "$python" -m "$here.learn" "$3" --out "$PRIOR" --seconds "$2" --data "$DATA" $start ${LIMIT:+--limit $LIMIT} $TOY \
        >>"$folder/log/learn.log" 2>&1 </dev/null &
    echo $! >"$folder/learn.pid"
    sleep "${SETTLE:-5}"
    tails
    ;;
warm)
    shift
    name=warm-$(echo "$*" | cksum | cut -d' ' -f1)
    code "$name"
    # shellcheck disable=SC2086
    setsid "$python" -m "$here.private" --warm --data "$DATA" --prior "$PRIOR" --table "$folder/wide-runs.csv" \
        --work "$folder/warm" $TOY "$@" >>"$folder/log/$name.log" 2>&1 </dev/null &
    ;;
log)
    tails
    results
    ;;
wait)
    end=$(($(date +%s) + $2))
    while [ "$(date +%s)" -lt "$end" ] && grep -qs . "/proc/$(cat "$folder/learn.pid")/cmdline"; do sleep 2; done
    tails
    results
    ;;
heads)
    shift
    # shellcheck disable=SC2086
    "$python" -m "$here.heads" --data "$DATA" --prior "$PRIOR" --table "$folder/wide-heads.csv" $TOY "$@" 2>&1 |
        tee -a "$folder/log/heads.log"
    results
    ;;
full)
    until=$(($(date +%s) + $2))
    shift 2
    # shellcheck disable=SC2086
    "$python" -m "$here.private" --data "$DATA" ${SCRATCH:---prior "$PRIOR"} --table "$folder/wide-runs.csv" --work "$folder/work" --until "$until" $TOY "$@" 2>&1 | tee -a "$folder/log/full.log"
    results
    ;;
*)
    sed -n '2,13p' "$0"
    exit 2
    ;;
esac
