#!/bin/sh
# What is left to measure on one GPU, in calls that may be stopped and repeated: what is done is not done again.
# First, from leaderboard/priors: `sh gpu.sh site` and `sh gpu.sh data PART`. KEEP (/tmp/priors) is kept between calls; tables are
# copied to OUT as evidence.tar.gz, while it runs too. COMMIT is written in rows.
#   sh gpu.sh run SECONDS "PARTS…" "STUDIES…"   both side by side, or one of them: one compiles or scores while the other trains.
#       A part of experiments.posterior.run is EPSILON:ARM; a study is PLAN:ONLY:STACK, runs of carry/PLAN.json with ONLY in their id
#   sh gpu.sh check                             experiments.reproduce on CIFAR-10: stacks against the ordinary loop
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
    [ -e "$work/rows.csv" ] || cp experiments/posterior/results/*.csv "$work/"
    # shellcheck disable=SC2086  # lists
    "$python" -m experiments.posterior.run --data "$DATA" --table "$work/rows.csv" --work "$work/runs" \
        --until "$(($(date +%s) + $1))" --lead "${LEAD:-150}" --parts $2 $TOY
}
studies() { # SECONDS STUDIES; or "check"
    "$python" - "$@" <<P
import sys, time
from pathlib import Path
import dpivon.study.plan.data as study_data
from dpivon.data.images import DataSet
from experiments.leaderboard.priors.data import cached
study_data.load_cifar10 = lambda root: DataSet("cifar10", *cached(Path(root)), True)  # decoded once
if sys.argv[1] == "check":
    import runpy
    sys.argv[1:] = ["--parts", "check", "--data", "$DATA", "--work", "$work/reproduce"]
    runpy.run_module("experiments.reproduce", run_name="__main__")
from dpivon.study.plan.plan import read_plan
from dpivon.study.run.runner import run_study
from dpivon.study.run.settings import Settings
until = time.monotonic() + float(sys.argv[1])
for plan, only, stack in (study.split(":") for study in sys.argv[2].split()):
    left = until - time.monotonic()
    if left > 30:
        settings = Settings(Path("$DATA"), stack=int(stack), minutes=left / 60, only=only, quiet=True)
        out = Path("$work") / plan
        print(only, *run_study(read_plan(Path(f"carry/{plan}.json")), out, settings).lines(out), sep="\n")
P
}
pack() {
    tar -C "$work" --exclude=./runs --exclude=stacks --exclude=.lock --exclude='*.partial' -czf "$OUT/evidence.partial" . 2>/dev/null
    mv "$OUT/evidence.partial" "$OUT/evidence.tar.gz"
}

case ${1:-} in
run)
    lanes=
    [ -z "$3" ] || { posterior "$2" "$3" >>"$work/posterior.log" 2>&1 & lanes="$lanes $!"; }
    [ -z "$4" ] || { studies "$2" "$4" >>"$work/studies.log" 2>&1 & lanes="$lanes $!"; }
    for lane in $lanes; do
        while kill -0 "$lane" 2>/dev/null; do
            sleep "${EVERY:-10}"
            pack
        done
    done
    tail -n 30 "$work"/*.log
    ;;
check) studies check ;;
plan)
    cat <<'P'
WRN-16-4 from leaderboard/wide/results/wide-places.npz, by leaderboard/wide/gpu.sh full (PRIOR=that file); compiling takes 100 s
   120  all weights after a flat head, on validation images: --places 4 --epsilons 1 3 8 --batch 4096 --steps 100 --views 1 --head
        0.6:flat-dp-steady:3.5 --arms dp-steady:0.35 dp-steady:0.7 dp-steady:0.7@0.35:flat-dp-steady:3.5; then --judge, 400 steps, 4 views
    60  on validation images, baselines: --places 4 --epsilons 1 3 8 --batch 4096 --steps 100 --views 1 --arms dp-sgd:0.6 dp-adam:0.003
    60  from scratch, with SCRATCH=" ": --places 4 --epsilons 1 3 8 --batch 4096 --steps 100 --views 1 --arms dp-steady:3.5
   450  judged again, --seed 1: --judge --places 4 --epsilons 1 3 8 --batch 4096 --steps 400 --views 4 --arms chosen
the paper's grid at its stated rates: experiments/paper/studies/paper-stated.yaml
   290  paper-stated:b512-:60
   305  paper-stated:b256-:60
   360  paper-stated:b128-:60
the other ε
   460  1:shift 3:shift
   320  weak:base weak:shift
   700  7.5:joint 1:joint 3:joint
   540  7.5:bound 1:bound 3:bound
stacks against the ordinary loop, DP-Steady among them
    75  check
attribution, per batch size: experiments/strong_privacy/studies/attribution-tuning.yaml, then pick, then attribution.yaml
   900  attribution-tuning:b512-:90
   250  attribution:b512-:48
then, where the tables are: python -m experiments.numbers && python -m experiments.posterior && python -m experiments.paper
P
    exit 0
    ;;
*)
    sed -n '2,9p' "$0"
    exit 2
    ;;
esac
pack
