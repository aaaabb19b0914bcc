#!/usr/bin/env bash
# Is `stride audit` right both ways? Leaked problems in ten forms, look-alikes and absent problems, in corpora of text,
# pairs and chats, items in the same three forms; a model trained from scratch on each corpus, and one fine-tuned on it.
#
#   examples/suites/audit_matrix.sh DATA WORK > audit_matrix.jsonl
#
# DATA holds gsm8k_train and gsm8k_test (.jsonl.gz). What is there already is not made again. Tables on stderr.
#   MAKE                 options of audit_matrix.py make: sizes, --develop
#   CORPORA, FORMS       of corpora and of items
#   MODELS               scratch tuned
#   CONTROLS             absent made
#   LAYERS WIDTH VOCAB   of the models
#   BASE                 a model to fine-tune instead of a small one: a directory, a hub id or a .gguf file
set -euo pipefail
data=$1 work=$2
here=$(cd "$(dirname "$0")" && pwd)
shape=(--layers "${LAYERS:-3}" --width "${WIDTH:-96}" --vocab "${VOCAB:-1024}")

# shellcheck disable=SC2086 # options are words
[ -e "$work/base.jsonl" ] || python "$here/audit_matrix.py" make "$data/gsm8k_train.jsonl.gz" \
    "$data/gsm8k_test.jsonl.gz" --out "$work" ${MAKE:-} >&2

# once FILE COMMAND…: stdout into FILE, which is there only when it is whole
once() {
    [ -e "$1" ] || { "${@:2}" >"$1.part" && mv "$1.part" "$1"; }
}

for corpus in ${CORPORA:-text pairs chats}; do
    at=$work/$corpus
    for model in ${MODELS:-scratch tuned}; do
        if [ "$model" = scratch ]; then
            [ -e "$at/$model" ] || stride model train "$at/corpus.jsonl" --out "$at/$model" "${shape[@]}" \
                --epochs "${EPOCHS:-8}" >&2
        else
            base=${BASE:-$work/base}
            [ -n "${BASE:-}" ] || [ -e "$base" ] || stride model train "$work/base.jsonl" --out "$base" \
                "${shape[@]}" --epochs "${BASE_EPOCHS:-3}" >&2
            [ -e "$at/$model" ] || stride model finetune "$at/corpus.jsonl" --model "$base" --out "$at/$model" \
                --epochs "${TUNED_EPOCHS:-5}" --lr "${LR:-2e-3}" >&2
        fi
        [ -e "$at/$model.stride" ] ||
            stride index build "$at/indexed.jsonl" --model "$at/$model" --out "$at/$model.stride" >&2
        # what only queries need is left out
        [ -e "$at/$model.trained" ] || { stride train --index "$at/$model.stride" --overwrite --no-calibration \
            --project 0 >&2 && touch "$at/$model.trained"; }
        [ -z "${AUDIT-yes}" ] && continue
        mkdir -p "$at/$model-audits"
        for controls in ${CONTROLS:-absent made}; do
            for form in ${FORMS:-text pairs chats}; do
                once "$at/$model-audits/audit-$form-$controls.jsonl" stride audit "$at/$form.jsonl" \
                    --index "$at/$model.stride" --controls "$controls"
            done
        done
    done
done
python "$here/audit_matrix.py" tables "$work"
