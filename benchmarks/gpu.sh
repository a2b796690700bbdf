#!/bin/sh
# Every table of benchmarks/results that needs a GPU, with nothing else running on it: about ten minutes on an H200, an estimate.
#   sh benchmarks/gpu.sh [FOLDER]         PYTHON=python3 by default; what is already in FOLDER is not measured again
set -u
folder=${1:-benchmarks/results}
python=${PYTHON:-python3}
plain="plain-bf16 plain-bf16-cl plain-bf16-compiled plain-bf16-cl-compiled plain-bf16-captured plain-bf16-cl-captured
       plain-bf16-compiled-captured plain-bf16-cl-compiled-captured"
export TORCHINDUCTOR_COMPILE_THREADS="${TORCHINDUCTOR_COMPILE_THREADS:-2}" # contenders compile side by side

measure() { # NAME COMMAND…
    file="$folder/$1.json"
    shift
    if [ -e "$file" ]; then echo "== $file is there"; else echo "== $*" && "$python" -m "$@" --json "$file"; fi
}
step() { # NAME MODEL BATCH [--only …]
    name=$1 model=$2 batch=$3
    shift 3
    measure "$name" benchmarks.step --device cuda --rounds 3 --steps 10 --warmup 3 --model "$model" --batch "$batch" "$@"
}

mkdir -p "$folder"
step step-cnn-512-h200 cnn 512
step step-cnn-128-h200 cnn 128
# shellcheck disable=SC2086  # a list of words
step step-wrn-h200 wrn 256 --only $plain opacus-hooks opacus-ghost ours-bf16 ours-captured
# shellcheck disable=SC2086
step step-text-h200 text 512 --only $plain ours-bf16 ours-captured
# shellcheck disable=SC2086
step step-vit-h200 vit 256 --only $plain ours-bf16 ours-captured
measure own-loop-h200 benchmarks.own_loop --batch 512 128
measure train-throughput-h200 benchmarks.train_throughput --seconds 2
measure transformers-h200 benchmarks.transformers --shapes 64x128,16x512,8x1024,roberta-large:16x128
measure stacked-h200 benchmarks.stacked --steps 64
measure scaling-h200 benchmarks.scaling --device cuda
