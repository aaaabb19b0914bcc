#!/usr/bin/env bash
# Suite 2, a table: examples/vision/parkinsons.sh parkinsons.csv [DIRECTORY]
# An MLP 22-128-2 on 150 recordings of voices, 45 others are the queries.
# (Recordings of one person are alike: that the nearest supporters share the speaker is what one should see.)
set -euo pipefail
here=$(dirname "$0")
TRAIN=${TRAIN:---field label=status --field id=name --network mlp --width 128 --shuffle --holdout 45}
export TRAIN
exec "$here/suite.sh" "$1" "${2:-stride-parkinsons}"
