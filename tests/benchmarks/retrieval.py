"""How often is the right document among the first ten? STRIDE, TF-IDF and chance, on real documents.

`--corpus` is the CIA World Factbook as JSON Lines (one section of one country a document, ids
``region/country#Section``), `--index` an index of it with operators. Prompts are drawn from the documents:
for random sections of distinct countries, the first half of a random sentence in which the country's own name
does not occur. A hit counts when its document belongs to the same country. Each prompt is asked twice: with
the model's own continuation, and with the sentence's real second half as the response.
"""

from __future__ import annotations

import argparse
import gzip
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from stride_cli.output import emit
from stride_cli.randomness import stream

TOP = 10


def read(path: Path) -> list[dict[str, str]]:
    content = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    return [json.loads(line) for line in content.splitlines()]


def country(document: str) -> str:
    return document.partition("#")[0]


def draw_prompts(documents: list[dict[str, str]], count: int, seed: int) -> list[dict[str, str]]:
    """Prompts about distinct countries: {document, prompt, response}."""
    random = stream(seed, "retrieval prompts")
    used: set[str] = set()
    prompts = []
    for number in random.permutation(len(documents)):
        document = documents[int(number)]
        place = country(document["id"])
        name = document["title"].partition(" - ")[0]
        sentences = [
            sentence.split()
            for sentence in re.split(r"(?<=[.;])\s+", document["text"])
            if 14 <= len(sentence.split()) <= 40 and name.lower() not in sentence.lower()
        ]
        if place in used or not sentences:
            continue
        words = sentences[int(random.integers(len(sentences)))]
        half = len(words) // 2
        prompts.append(
            {
                "document": document["id"],
                "prompt": " ".join(words[:half]),
                "response": " " + " ".join(words[half:]),
            }
        )
        used.add(place)
        if len(prompts) == count:
            break
    return prompts


def run(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    from sklearn.feature_extraction.text import TfidfVectorizer

    from stride_cli.api import QueryOptions, Session

    documents = read(arguments.corpus)
    prompts = draw_prompts(documents, arguments.prompts, arguments.seed)
    places = [country(document["id"]) for document in documents]
    session = Session.open(arguments.index)
    vectorizer = TfidfVectorizer(ngram_range=(1, 2), max_features=50_000, sublinear_tf=True)
    matrix = vectorizer.fit_transform(document["text"] for document in documents)
    own = np.asarray([places.count(country(prompt["document"])) for prompt in prompts])
    others = len(documents) - own
    # chance that none of ten random documents belongs to the country
    missed = np.prod([(others - drawn) / (len(documents) - drawn) for drawn in range(TOP)], axis=0)
    for given in (False, True):
        found: dict[str, list[bool]] = {"stride": [], "tf-idf": [], "tf-idf, prompt only": []}
        first = []
        for prompt in prompts:
            answer = session.query(
                prompt["prompt"], QueryOptions(top=TOP), response=prompt["response"] if given else None
            )
            wanted = country(prompt["document"])
            hits = [country(answer.document_ids[hit.document]) for hit in answer.supporters]
            found["stride"].append(wanted in hits)
            first.append(answer.document_ids[answer.supporters[0].document] == prompt["document"])
            for name, text in (
                ("tf-idf", prompt["prompt"] + answer.query.response),
                ("tf-idf, prompt only", prompt["prompt"]),
            ):
                scores = (matrix @ vectorizer.transform([text]).T).toarray()[:, 0]
                best = np.argsort(-scores, kind="stable")[:TOP]
                found[name].append(wanted in {places[int(number)] for number in best})
            if arguments.verbose:
                print(json.dumps({**prompt, "said": answer.query.response, "hits": hits}), file=sys.stderr)
        yield {
            "benchmark": "retrieval",
            "response": "the document's own" if given else "the model's own",
            "prompts": len(prompts),
            "documents": len(documents),
            "chunks": session.index.n_chunks,
            "subsets": session.index.n_subsets,
            "parameters": session.model.n_parameters,
            "space": session.operators.space_name,
            "right_country_in_top_10": {name: int(np.sum(values)) for name, values in found.items()},
            "chance": float(np.sum(1 - missed)),
            "right_document_on_top": int(np.sum(first)),
        }


def main(arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks retrieval", description=__doc__)
    parser.add_argument("--corpus", type=Path, required=True)
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=30)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--verbose", action="store_true")
    for record in run(parser.parse_args(arguments)):
        emit(record)
