#!/bin/sh
# What is left to measure on one GPU, in pieces that may be stopped and repeated: what is done is not done again.
# First, from leaderboard/priors: `sh gpu.sh site` and `sh gpu.sh data PART`. KEEP (/tmp/priors) is kept between calls; tables are
# copied to OUT as evidence.tar.gz. COMMIT is written in rows.
#   sh gpu.sh posterior SECONDS "EPS…" "ARMS…" "SEEDS…"    experiments.posterior.run
#   sh gpu.sh check                                         experiments.reproduce on CIFAR-10: stacks against the ordinary loop
#   sh gpu.sh study SECONDS PLAN ONLY STACK                 carry/PLAN.json, made by `dpivon study resolve`; runs with ONLY in their id
#   sh gpu.sh plan                                          what is left, with about how many seconds it takes on an H200
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

case ${1:-} in
posterior)
    [ -e "$work/rows.csv" ] || cp experiments/posterior/results/*.csv "$work/"
    # shellcheck disable=SC2086  # lists
    "$python" -m experiments.posterior.run --data "$DATA" --table "$work/rows.csv" --work "$work/runs" \
        --until "$(($(date +%s) + $2))" --only $3 --arms $4 --seeds $5 $TOY
    ;;
study | check)
    "$python" - "$@" <<P
import sys
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
seconds, plan, only, stack = sys.argv[2:]
settings = Settings(Path("$DATA"), stack=int(stack), minutes=float(seconds) / 60, only=only, quiet=True)
out = Path("$work") / plan
print(*run_study(read_plan(Path(f"carry/{plan}.json")), out, settings).lines(out), sep="\n")
P
    ;;
plan)
    cat <<'P'
posterior: about 20 s to train a seed's four runs, 20 s to score them on clean and OOD images, 45 s on corrupted ones
   300  posterior 290 "7.5" "base shift" "0 1 2 3 4"      twice
   330  posterior 320 "1 3" "shift" "0 1 2 3 4"           twice
   430  posterior 420 "weak" "base shift" "0 1 2 3 4"
   660  posterior 560 "7.5 1 3" "joint" "0 1 2 3 4"       twice
   540  posterior 540 "7.5 1 3" "bound" "0 1 2 3 4"
stacks against the ordinary loop, DP-Steady among them
    75  check
the paper's grid at its stated rates: experiments/paper/studies/paper-stated.yaml
   300  study 300 paper-stated b512- 60
   310  study 310 paper-stated b256- 60
   420  study 420 paper-stated b128- 60
attribution, per batch size: experiments/strong_privacy/studies/attribution-tuning.yaml, then pick, then attribution.yaml
   900  study 560 attribution-tuning b512- 90             twice
   250  study 280 attribution b512- 48
then, where the tables are: python -m experiments.numbers && python -m experiments.posterior && python -m experiments.paper
P
    exit 0
    ;;
*)
    sed -n '2,9p' "$0"
    exit 2
    ;;
esac
tar -C "$work" --exclude=./runs --exclude=stacks --exclude=.lock -czf "$OUT/evidence.tar.gz" .
