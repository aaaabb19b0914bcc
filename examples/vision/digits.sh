#!/usr/bin/env bash
# Suite 3, a convolutional network: examples/vision/digits.sh [digits.npz] [DIRECTORY]
# A small ResNet-9 on 1,000 of scikit-learn's 8 × 8 digits, 100 others are the queries. Without a file, or
# where it is absent, the digits are written there first.
set -euo pipefail
here=$(dirname "$0")
data=${1:-digits.npz}
if [ ! -f "$data" ]; then
  python - "$data" <<'PYTHON'
import sys
import numpy as np
from sklearn.datasets import load_digits

digits = load_digits()
np.savez(sys.argv[1], images=digits.images.astype(np.uint8), labels=digits.target)
PYTHON
fi
TRAIN=${TRAIN:---network resnet9 --width 8 --rows 1000 --holdout 100}
export TRAIN
exec "$here/suite.sh" "$data" "${2:-stride-digits}"
