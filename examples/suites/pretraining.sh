#!/usr/bin/env bash
# Benchmark suite: pre-training. A small NanoChat model is trained on passages of a corpus, then again on 64
# random halves of them; every method is asked which halves lower the loss of held-out passages.
#
#   examples/suites/pretraining.sh articles.jsonl.gz WORK [SUBSETS]
#
# articles.jsonl.gz has one {"id", "text"} a line; several files are joined: "a.jsonl.gz b.jsonl.gz". Interrupted,
# it goes on where it was. PASSAGES, WORDS, QUERIES, LAYERS, WIDTH, VOCAB, CONTEXT, EPOCHS, SEEDS, METHODS change what
# is run.
set -euo pipefail
articles=$1 work=$2 subsets=${3:-64}
here=$(cd "$(dirname "$0")" && pwd)

# shellcheck disable=SC2086 # the files are words
[ -e "$work/corpus.jsonl" ] || python "$here/passages.py" $articles --out "$work" \
    ${PASSAGES:+--passages "$PASSAGES"} ${WORDS:+--words "$WORDS"} ${QUERIES:+--queries "$QUERIES"} ${QUERY_WORDS:+--query-words "$QUERY_WORDS"}
[ -e "$work/model" ] || stride model train "$work/corpus.jsonl" --out "$work/model" \
    --layers "${LAYERS:-4}" --width "${WIDTH:-128}" --vocab "${VOCAB:-2048}" \
    --context "${CONTEXT:-128}" --epochs "${EPOCHS:-4}" --checkpoints 3
[ -e "$work/run.stride" ] || stride index build "$work/corpus.jsonl" --model "$work/model" --out "$work/run.stride"
python "$here/one_chunk.py" "$work/queries.jsonl" --index "$work/run.stride" --model "$work/model"
stride evaluate truth --index "$work/run.stride" --queries "$work/queries.jsonl" \
    --subsets "$subsets" --seeds "${SEEDS:-1}" --alpha 0.5 --keep "$work/retrained"
stride evaluate compare --index "$work/run.stride" --alpha 0.5 --html "$work/comparison.html" --methods \
    "${METHODS:-stride,stride:buckets=2048,direct,stride:recipe=paper,tfidf,tfidf:ngrams=1,bm25,chance,rds,featsim,embeddings,dsir,graddot,tracin,logra,ekfac,trackstar,trak,less,datamodels}" \
    --json | tee "$work/comparison.jsonl"
