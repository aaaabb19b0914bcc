#!/usr/bin/env bash
# bm25s and TfidfVectorizer find nothing in Chinese: a sentence is one word to them.
#
# Versions: bm25s 0.3.16, scikit-learn 1.9.1.
# Behaviour: both cut text by the pattern \b\w\w+\b. Chinese has no spaces, so a whole clause is one token, and a word of
# it asked alone matches no document. Every score is 0, and documents come back all the same, in order of their number.
# Surprise: nothing is raised or warned of, and the ranking looks like one. Search baselines on such corpora are at
# chance for this reason alone.
# Way round: tokens of the model, or characters, as the analyser.
# Seen: "bm25s [0. 0. 0.], tf-idf [0. 0. 0.], by characters 1st of 3"
set -euo pipefail
work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
python3 -m venv "$work/venv"
"$work/venv/bin/pip" install --quiet bm25s==0.3.16 scikit-learn==1.9.1
cd "$work"
"$work/venv/bin/python" -W ignore - <<'PYTHON'
import bm25s
from sklearn.feature_extraction.text import TfidfVectorizer

documents = ["托维国的首都是索特拉。", "该国的货币是卢恩。", "The capital is Sotra."]
query = "首都"
index = bm25s.BM25()
index.index(bm25s.tokenize(documents, show_progress=False), show_progress=False)
asked = bm25s.tokenize([query], show_progress=False)
_, scores = index.retrieve(asked, k=3, show_progress=False)


def tfidf(**settings):
    words = TfidfVectorizer(**settings)
    return (words.fit_transform(documents) @ words.transform([query]).T).toarray()[:, 0]


by_word, by_character = tfidf(), tfidf(analyzer="char")
print(f"bm25s {scores[0]}, tf-idf {by_word}, by characters {'1st' if by_character.argmax() == 0 else 'not 1st'} of 3")
assert not scores.any() and not by_word.any() and by_character.argmax() == 0 and by_character[0] > 0
PYTHON
