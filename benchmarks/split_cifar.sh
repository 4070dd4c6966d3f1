#!/usr/bin/env bash
# The experiments about Split CIFAR in docs/reproduction.md, most of them over five seeds, each into
# a file of its own:
#
#     bash benchmarks/split_cifar.sh FOLDER [arguments for sensitivity.py, such as --data DIR]
#
# What has its file already is not done again, so the program can be interrupted. What fails is
# named at the end. On an H200 that is estimated to be half an hour, on a CPU it is days: there,
# `--seeds 1 --set stream_options.train_examples=20` shows whether everything runs.
set -u
[ $# -gt 0 ] || { echo "name a folder for the outputs: bash benchmarks/split_cifar.sh FOLDER" >&2; exit 2; }
folder=$1
shift
here=$(dirname "$0")
mkdir -p "$folder" || exit 2 # it says why
failed=()

try() { # NAME ARGUMENTS…
    local name=$1
    shift
    [ -s "$folder/$name.md" ] && return
    echo "$name"
    set -- "$@" --recipe split-cifar --beside "$here/../results/split-cifar" --markdown "$folder/$name.md"
    python "$here/sensitivity.py" "$@" >"$folder/$name.log" 2>&1 || failed+=("$name")
}

extra=("$@")
# What decides 62.3?
try a-gem-exact a-gem learning_rate=0.03 --seeds 5 --set tf32=false "${extra[@]}"
try a-gem-still a-gem learning_rate=0.03 --seeds 5 --set options.a-gem.reference_moves_buffers=false "${extra[@]}"
try a-gem-union a-gem learning_rate=0.03 --seeds 5 --variant union "${extra[@]}"
try a-gem-torch-norm a-gem learning_rate=0.03 --seeds 5 --set batch_norm=torch "${extra[@]}"
try a-gem-256-exact a-gem learning_rate=0.03 --seeds 5 --set options.a-gem.reference_batch=256 --set tf32=false "${extra[@]}"
try a-gem-256-still a-gem learning_rate=0.03 --seeds 5 --set options.a-gem.reference_batch=256 --set options.a-gem.reference_moves_buffers=false "${extra[@]}"
# What else differs from the paper?
try gem-paper gem learning_rate=0.03,0.1 margin=0 --seeds 5 "${extra[@]}"
try gem-own gem learning_rate=0.1 margin=0.5 --seeds 5 --set initialisation=torch --set batch_norm=torch --set memory=ring "${extra[@]}"
try s-gem s-gem learning_rate=0.03 --seeds 20 "${extra[@]}"
try icarl-gem icarl learning_rate=1 --seeds 5 --variant gem --set initialisation=torch --set batch_norm=torch "${extra[@]}"
# With the paper's choices and with those made here
try ewc ewc learning_rate=0.03,0.01 strength=1,10 --seeds 10 "${extra[@]}"
try pi pi learning_rate=0.03,0.01 strength=0.001,0.1 --seeds 10 "${extra[@]}"
try mas mas learning_rate=0.03,0.01 strength=0.1,1 --seeds 10 "${extra[@]}"
try rwalk rwalk learning_rate=0.03 strength=1,10 --seeds 10 "${extra[@]}"
try multi-task multi-task learning_rate=0.03 --seeds 5 --set stream_options.train_examples=2000 "${extra[@]}"

[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}; see $folder/NAME.log" >&2; exit 1; }
