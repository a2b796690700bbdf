#!/bin/sh
# What is left to measure on one GPU, in calls that may be stopped and repeated: what is done is not done again.
# First, from leaderboard/priors: `sh gpu.sh site` and `sh gpu.sh data PART`. KEEP (/tmp/priors) is kept between calls; tables are
# copied to OUT as evidence.tar.gz, while it runs too. COMMIT is written in rows.
#   sh gpu.sh run SECONDS "ITEMS…" ["ITEMS…"]   lanes of items side by side: one compiles or scores while the other trains. An item is
#       EPSILON:ARM[,EPSILON:ARM…]              parts of experiments.posterior.run, by the seeds of SEEDS (0 1 2)
#       PLAN:ONLY:STACK[:TUNING|:hooks]         runs of a study with ONLY in their id, so many together; at the rates of TUNING, or
#                                               in the ordinary loop too
#       check                                   experiments.reproduce on CIFAR-10: published cells again
#   sh gpu.sh code FILE.tar.gz                  the committed files that these runs need, small enough to travel beside the data
#   sh gpu.sh plan                              what is left, with about how many seconds of an H200 it takes
set -u
KEEP=${KEEP:-/tmp/priors}
DATA=${DATA:-$KEEP/cifar10}
OUT=${OUT:-$KEEP/out}
TOY=${TOY:-}
python=${PYTHON:-python3}
work=$KEEP/evidence
mkdir -p "$work" "$OUT"
PYTHONPATH="$PWD/src:$PWD:$KEEP/site"
DPIVON_COMMIT=${COMMIT:-}
export PYTHONPATH DPIVON_COMMIT PYTHONUNBUFFERED=1 TORCHINDUCTOR_CACHE_DIR="$KEEP/inductor" TRITON_CACHE_DIR="$KEEP/triton"

posterior() { # SECONDS PARTS
    for table in rows sets; do
        [ -e "$work/$table.csv" ] || cp "experiments/posterior/results/$table.csv" "$work/"
    done
    # shellcheck disable=SC2086  # lists
    "$python" -m experiments.posterior.run --data "$DATA" --table "$work/rows.csv" --work "$work/runs" \
        --until "$(($(date +%s) + $1))" --lead "${LEAD:-60}" --seeds ${SEEDS:-0 1 2} --parts $2 $TOY
}
studies() { # SECONDS STUDIES; or "check"
    "$python" - "$@" <<P
import sys, time
from collections import Counter
from dataclasses import replace
from pathlib import Path
import dpivon.study.plan.data as study_data
from dpivon.data.images import DataSet
from experiments.leaderboard.priors.data import cached
data, work, toy = Path("$DATA"), Path("$work"), bool("$TOY")
study_data.load_cifar10 = lambda root: DataSet("cifar10", *cached(Path(root)), True)  # decoded once
if sys.argv[1] == "check":
    import runpy
    sys.argv[1:] = ["--parts", "check", "--data", str(data), "--work", str(work / "reproduce")]
    runpy.run_module("experiments.reproduce", run_name="__main__")
from dpivon.study.plan.config import resolve
from dpivon.study.results import table
from dpivon.study.results.tuning import pick
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
from experiments.paper.hooks import run_hooks
def study_file(name):
    return next(Path("experiments").glob(f"*/studies/{name}.yaml"))
def tuned(name, only):  # every candidate of the cells that are asked for, by equally many seeds
    def candidate(run):
        return tuple(run[k] for k in ("method", "batch_size", "noise_multiplier", "max_grad_norm", "lr"))
    planned = {candidate(vars(run)) for run in resolve(study_file(name)).runs if only in run.id}
    found = Counter(map(candidate, table.read(work / name / "tuning.csv")))
    seeds = [found[one] for one in planned]
    return min(seeds) == max(seeds) > 0
until = time.monotonic() + float(sys.argv[1])
for study in sys.argv[2].split():
    name, only, stack, *more = study.split(":")
    left = until - time.monotonic()
    if left < 30:
        break
    hooks, rates = more == ["hooks"], None
    if more and not hooks:
        if not tuned(more[0], only):
            print(f"{name}: {more[0]} is not finished", flush=True)
            continue
        rates = work / f"{more[0]}-lr.json"
        print(pick(work / more[0], rates, by_cell=True), flush=True)
    plan = resolve(study_file(name), rates)
    plan = replace(plan, epochs=1) if toy else plan
    settings = Settings(data, stack=int(stack), minutes=left / 60, only=only, quiet=True)
    print(name, only, *run_study(plan, work / name, settings).lines(work / name), sep="\n", flush=True)
    if hooks:
        settings = replace(settings, minutes=max(1.0, until - time.monotonic()) / 60)
        print(*run_hooks(plan, work / name, settings).lines(work / name), sep="\n", flush=True)
P
}
lane() { # SECONDS ITEMS
    end=$(($(date +%s) + $1))
    for item in $2; do
        left=$((end - $(date +%s)))
        [ "$left" -lt 30 ] && echo "$item: no time left" && break
        some=$(echo "$item" | tr , ' ')
        case $item in
        check) studies check ;;
        [0-9]*) posterior "$left" "$some" ;;
        *) studies "$left" "$some" ;;
        esac
    done
}
pack() {
    tar -C "$work" --exclude=./runs --exclude=stacks --exclude=.lock --exclude='*.partial' -czf "$OUT/evidence.partial" . 2>/dev/null
    mv "$OUT/evidence.partial" "$OUT/evidence.tar.gz"
}

case ${1:-} in
run)
    seconds=$2
    shift 2
    lanes= number=0
    for items; do
        number=$((number + 1))
        lane "$seconds" "$items" >>"$work/lane-$number.log" 2>&1 &
        lanes="$lanes $!"
    done
    for lane in $lanes; do
        while kill -0 "$lane" 2>/dev/null; do
            sleep "${EVERY:-10}"
            pack
        done
    done
    tail -n 30 "$work"/*.log
    ;;
code)
    needed="experiments/posterior/results/rows.csv experiments/posterior/results/sets.csv experiments/leaderboard/wide/results/wide-places.npz"
    # shellcheck disable=SC2046,SC2086  # lists of names without spaces
    git archive --format=tar.gz -o "$2" HEAD $(git ls-files | grep -vE '^experiments/.*/results/|^docs/|\.png$') $needed
    exit 0
    ;;
plan)
    cat <<'P'
priors: WORK keeps features, those of WRN-16-4 take 100 s alone
   400  leaderboard.flat wide --judge --seeds 1 2 3 --epsilons 8 --steps 400 --arms dp-steady:0.3@0.35; .7 s a step and run
    60  leaderboard.wide.private --places 1 --epsilons 1 8 --batch 4096 --steps 150 --views 1 --arms dp-steady:3.5 dp-steady:1.75; and the
        same with --norm-first; compiling takes 100 s each
evidence: sh gpu.sh run 570 LANE LANE, both of them within 570 s; each of its items, alone on the GPU
    60  attribution with rates beyond the chosen edges: .00003 for DP-SGD, .1 for DP-IVON-Gradsq; then b = 128 and 256, C = 20
    82  paper-stated:b128-:12                                                  the paper's stated rates, one seed
    69  paper-stated:b256-:12
then, as far as there is time
   320  1:shift 3:shift
   150  7.5:joint 1:joint
   140  7.5:bound 1:bound
    60  check
then, where the tables are unpacked: python -m experiments.paper && python -m experiments.strong_privacy && python -m experiments.posterior
    && python -m experiments.numbers
P
    exit 0
    ;;
*)
    sed -n '2,11p' "$0"
    exit 2
    ;;
esac
pack
