# What the suites of planted causes do with their corpus: sourced, with pairs, work, here, EPOCHS, LR and MEASURE set,
# and BY, a field of the queries, where they are to be counted by its values.
# SCRATCH=1 trains the models from scratch, which takes a fraction of the time where many are trained again. TRAIN holds
# options of `stride model train` and `finetune`, "--dtype fp32" where that is faster.
sizes=(--layers "${LAYERS:-4}" --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" --context 256)

# taught CORPUS OUT: a model that has learnt it
# shellcheck disable=SC2086 # options are words
taught() {
    if [ -n "${SCRATCH:-}" ]; then
        stride model train "$1" --out "$2" "${sizes[@]}" --epochs "$EPOCHS" ${TRAIN:-} >&2
    else
        stride model finetune "$1" --model "$base" --out "$2" --epochs "$EPOCHS" --lr "$LR" ${TRAIN:-} >&2
    fi
}

base=${BASE:-$work/base}
if [ -n "${SCRATCH:-}" ]; then
    base=$work/corpus
    [ -e "$base" ] || taught "$work/corpus.jsonl" "$base"
elif [ ! -e "$base" ] && [ -z "${BASE:-}" ]; then
    python "$here/instructions.py" "$pairs" --out "$work/instructions" --queries 0 ${OF_BASE:+--pairs "$OF_BASE"}
    # shellcheck disable=SC2086
    stride model train "$work/instructions/base.jsonl" --out "$base" "${sizes[@]}" --epochs "${BASE_EPOCHS:-4}" \
        ${TRAIN:-} >&2
fi

# once FILE COMMAND…: stdout into FILE, which is there only when it is whole
once() {
    [ -e "$1" ] || { "${@:2}" >"$1.part" && mv "$1.part" "$1"; }
}

# before any method looks at a model: words must not tell
[ -e "$work/search.stride" ] || stride index build "$work/corpus.jsonl" --model "$base" --out "$work/search.stride" >&2
once "$work/searchable.jsonl" python "$here/searchable.py" "$work/queries.jsonl" --index "$work/search.stride" \
    --measure "$MEASURE" --most "${MOST:-0.5}"
for each in corpus without; do
    [ -e "$work/$each" ] || taught "$work/$each.jsonl" "$work/$each"
done
# a base model has no habit to compare with: between two tokens that it does not expect it throws a coin
others=("$work/without")
[ "$MEASURE" = auprc ] || [ -n "${SCRATCH:-}" ] || others+=("$base")
once "$work/known.out" python "$here/known.py" "$work/queries.jsonl" --model "$work/corpus" \
    --not "${others[@]}" --out "$work/known.jsonl" ${BY:+--by "$BY"}
[ -e "$work/run.stride" ] || stride index build "$work/corpus.jsonl" --model "$work/corpus" --out "$work/run.stride" >&2
[ -e "$work/run.stride/operators" ] || stride train --index "$work/run.stride" >&2
stride evaluate causes --index "$work/run.stride" --queries "$work/known.jsonl" --at 1,5,10,50 \
    --html "$work/causes.html" --json --methods \
    "${METHODS:-stride:stored=true,direct,bm25,tfidf,tfidf:ngrams=1,pairs,embeddings,chance,rds,featsim,graddot,logra,ekfac,ekfac:layers=all,trackstar,trak}" \
    >"$work/causes.jsonl"
cat "$work/searchable.jsonl" "$work/known.out"
grep -F '"stride.causes/1"' "$work/causes.jsonl"
