#!/bin/sh
# What is left to measure on one GPU, in pieces that may be stopped and repeated: what is done is not done again.
# First, from leaderboard/priors: `sh gpu.sh site` and `sh gpu.sh data PART`. KEEP (/tmp/priors) is kept between calls; tables are
# copied to OUT as evidence.tar.gz. COMMIT is written in rows.
#   sh gpu.sh posterior SECONDS "EPS…" "ARMS…" "SEEDS…"    experiments.posterior.run
#   sh gpu.sh check                                         experiments.reproduce on CIFAR-10: stacks against the ordinary loop
#   sh gpu.sh study SECONDS PLAN ONLY STACK                 carry/PLAN.json, made by `dpivon study resolve`; runs with ONLY in their id
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
*)
    sed -n '2,8p' "$0"
    exit 2
    ;;
esac
tar -C "$work" --exclude=./runs --exclude=stacks --exclude=.lock -czf "$OUT/evidence.tar.gz" .
