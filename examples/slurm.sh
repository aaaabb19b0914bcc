#!/usr/bin/env bash
#SBATCH --job-name=stride
#SBATCH --array=1-8
#SBATCH --cpus-per-task=4
#SBATCH --output=stride-%A-%a.log
# An index built by an array job, one range of the corpus a task; then merged, and its operators fitted:
#   job=$(sbatch --parsable examples/slurm.sh corpus.jsonl model run)
#   sbatch --dependency="afterok:$job" --array=0 examples/slurm.sh corpus.jsonl model run
# All nodes see the same corpus, model and DIRECTORY. A task that failed or was killed: submit it again
# (--array=3), it goes on where it was. The number of tasks is that of --array, and decides nothing else.
set -euo pipefail
corpus=$1 # a file, or a glob in quotes
model=$2
run=${3:-stride-run}
task=$SLURM_ARRAY_TASK_ID
mkdir -p "$run/parts"

if [ "$task" -gt 0 ]; then
  tasks=${STRIDE_RANGES:-$SLURM_ARRAY_TASK_MAX} # of a task that is submitted again: STRIDE_RANGES=8 sbatch --array=3 …
  part=$run/parts/$task-of-$tasks.stride
  [ -d "$part" ] || stride index build "$corpus" --model "$model" --range "$task/$tasks" --out "$part"
else
  [ -d "$run/run.stride" ] || stride index merge "$run"/parts/*.stride --out "$run/run.stride"
  [ -d "$run/run.stride/operators" ] || stride train --index "$run/run.stride"
fi
