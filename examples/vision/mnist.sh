#!/usr/bin/env bash
# Suite 1, MNIST: examples/vision/mnist.sh mnist10k.npz [DIRECTORY]
# An MLP 784-128-10 on 2,000 digits; 100 held-out digits are the queries; the truth is 100 random halves, and
# 100 random 30 %, of the training rows, each retrained from 5 seeds.
#   SUBSETS=100 SEEDS=5 ALPHAS="0.5 0.3" METHODS=… RESPONSES="loss margin" change what is run.
set -euo pipefail
here=$(dirname "$0")
TRAIN=${TRAIN:---network mlp --width 128 --rows 2000 --holdout 100}
export TRAIN
exec "$here/suite.sh" "$1" "${2:-stride-mnist}"
