#!/bin/sh
# The experiments on one GPU, in calls of less than ten minutes, each of which may be repeated: what is done is not done again.
#   sh gpu.sh site               what Python lacks there, from carry/site; and the priors in results/, with a new hidden layer too
#   sh gpu.sh data PART          one of PARTS (4) parts of the data set, carry/cifar10.tar.PART, kept outside the copy of the repository
#   sh gpu.sh learn SECONDS P…   learn priors P… side by side, in the background; P is PROCESS-NAME, and *-wide is --wide
#   sh gpu.sh wait SECONDS       show how they get on, until they have ended or the time is over
#   sh gpu.sh spread P…          copies P-spread of priors with a hidden layer of principal components
#   sh gpu.sh private UNTIL P…   plans P… one after the other, until so many seconds from now
#   sh gpu.sh tests SECONDS      tests/gpu, file by file
# PYTHON=python3 by default. KEEP (/tmp/priors) is kept between calls; results are copied to OUT. COMMIT is written in rows.
set -u
KEEP=${KEEP:-/tmp/priors}
DATA=${DATA:-$KEEP/cifar10}
OUT=${OUT:-$KEEP/out}
TOY=${TOY:-}
python=${PYTHON:-python3}
parts=${PARTS:-4}
here=experiments.leaderboard.priors
mkdir -p "$KEEP/parts" "$KEEP/work" "$KEEP/log" "$OUT"
PYTHONPATH="$PWD/src:$PWD:$KEEP/site"
DPIVON_COMMIT=${COMMIT:-}
export DPIVON_COMMIT PYTHONPATH PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$KEEP/inductor" TRITON_CACHE_DIR="$KEEP/triton"

# shellcheck disable=SC2046  # lists of names without spaces
learned() { # the priors that are there
    find "$KEEP" -maxdepth 1 -name '*.safetensors' ! -name '*.state.safetensors' | sort
}
results() { # what comes back: tables, logs, priors, and what learning goes on from
    cp "$KEEP"/*.csv "$OUT" 2>/dev/null
    tail -n +1 "$KEEP"/log/*.log >"$OUT/log.txt" 2>/dev/null
    [ -z "$(learned)" ] && return
    (cd "$KEEP" && tar -czf "$OUT/priors.tar.gz" $(find . -maxdepth 1 -name '*.safetensors' ! -name '*.state.*'))
    for method in dp-steady dp-sgd dp-adam; do
        found=$(cd "$KEEP" && find means -name "test-$method-*" 2>/dev/null)
        [ -n "$found" ] && (cd "$KEEP" && tar -czf "$OUT/means-$method.tar.gz" $found)
    done
}
spread() { # a copy of prior $1 with a hidden layer of principal components, unless it is there
    [ -e "$KEEP/$1-spread.safetensors" ] && return
    "$python" -m "$here.spread" "$KEEP/$1.safetensors" --process "${1%%-*}" --out "$KEEP/$1-spread.safetensors"
}

case ${1:-} in
site)
    mkdir -p "$KEEP/site" && cp -r carry/site/. "$KEEP/site/"
    cp experiments/leaderboard/priors/results/filters.safetensors "$KEEP/"
    spread filters
    ;;
data)
    cp "carry/cifar10.tar.$2" "$KEEP/parts/"
    # Results of earlier calls to go on from: priors, their states, and the table.
    for file in priors.tar.gz states.tar.gz; do [ -e "carry/$file" ] && tar -C "$KEEP" -xzf "carry/$file"; done
    [ -e carry/runs.csv ] && cp carry/runs.csv "$KEEP/"
    have=$(find "$KEEP/parts" -name 'cifar10.tar.*' | wc -l)
    echo "parts: $have of $parts"
    if [ "$have" -eq "$parts" ] && [ ! -d "$DATA" ]; then
        cat "$KEEP"/parts/cifar10.tar.* | tar -C "$KEEP" -xf -
        [ -e "$DATA/unpack.py" ] && "$python" "$DATA/unpack.py" "$DATA" # compact parts, to the official layout
        "$python" -c "from pathlib import Path; from $here.data import cached; cached(Path('$DATA'))"
        ls -l "$DATA"
    fi
    ;;
learn)
    seconds=$2
    shift 2
    # The next call's transfer must not change the code that runs in the background.
    rm -rf "$KEEP/code" && mkdir -p "$KEEP/code" && cp -r src experiments "$KEEP/code/"
    cd "$KEEP/code" || exit 1
    PYTHONPATH="$KEEP/code/src:$KEEP/code:$KEEP/site"
    for prior; do
        wide=
        case $prior in *-wide) wide=--wide ;; esac
        # shellcheck disable=SC2086  # flags or none
        setsid "$python" -m "$here.learn" "${prior%%-*}" $wide --out "$KEEP/$prior.safetensors" --seconds "$seconds" \
            --limit "$((seconds + 60))" $TOY >>"$KEEP/log/learn-$prior.log" 2>&1 </dev/null &
        echo $! >"$KEEP/log/learn-$prior.pid"
    done
    sleep "${SETTLE:-20}"
    tail -n 2 "$KEEP"/log/learn-*.log
    ;;
wait)
    end=$(($(date +%s) + $2))
    while [ "$(date +%s)" -lt "$end" ]; do
        busy=
        for file in "$KEEP"/log/learn-*.pid; do grep -qs . "/proc/$(cat "$file")/cmdline" && busy=yes; done
        [ -z "$busy" ] && break
        sleep 2
    done
    tail -n 3 "$KEEP"/log/learn-*.log
    results
    (cd "$KEEP" && tar -czf "$OUT/states.tar.gz" $(find . -maxdepth 1 -name '*.state.safetensors'))
    ;;
spread)
    shift
    for prior; do spread "$prior"; done
    ;;
tests)
    until=$(($(date +%s) + $2))
    first="no_waiting shares distributed evaluation beyond_on_gpu"
    files=$(for name in $first; do echo "tests/gpu/test_$name.py"; done; find tests/gpu -name 'test_*.py' | sort)
    for file in $(echo "$files" | awk '!seen[$0]++'); do
        left=$((until - $(date +%s)))
        [ "$left" -lt 10 ] && echo "$file: no time left" && continue
        [ -e "$file" ] || continue
        echo "== $file"
        DPIVON_CONV_KERNELS=1 timeout "$left" "$python" -m pytest -q -p no:cacheprovider -n "${JOBS:-8}" "$file" 2>&1 | tail -n 25
    done | tee -a "$KEEP/log/tests.log"
    results
    ;;
private)
    until=$(($(date +%s) + $2))
    shift 2
    for plan; do
        judge=
        case $plan in judge | final | board | fashion) judge=--judge ;; esac
        # shellcheck disable=SC2086  # a flag or none
        if [ "$plan" = probe ]; then
            "$python" -m "$here.probe" --data "$DATA" --priors $(learned) --table "$KEEP/probe.csv" $TOY
        else
            "$python" -m "$here.private" "$plan" $judge --data "$DATA" --priors $(learned) \
                --table "$KEEP/runs.csv" --work "$KEEP/work" --until "$until" $TOY
        fi 2>&1 | tee -a "$KEEP/log/private-$plan.log"
    done
    results
    ;;
*)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
