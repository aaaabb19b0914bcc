"""Cut documents into short passages, some of them held out as queries: the corpus of a benchmark suite.

    python examples/suites/passages.py articles.jsonl.gz --out suite --words 70 --passages 3072

Writes suite/corpus.jsonl (one passage a document, ids ``article/number``) and suite/queries.jsonl. A quarter
of the queries come from articles of which the corpus holds nothing (ids ``other/…``: what remains of a method
where wording is not shared), the others from articles of the corpus (ids ``same/…``).
"""

from __future__ import annotations

import argparse
import gzip
import json
from pathlib import Path

from stride_cli.randomness import stream


def cut(text: str, words: int) -> list[str]:
    """Runs of that many words; a last run of less than half of them joins the one before."""
    found = text.split()
    starts = list(range(0, len(found), words))
    if len(starts) > 1 and len(found) - starts[-1] < words // 2:
        starts.pop()
    return [" ".join(found[a:b]) for a, b in zip(starts, [*starts[1:], len(found)], strict=True)]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("documents", type=Path, nargs="+", help="JSON Lines of {id, text}, also .gz")
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--words", type=int, default=70, help="words of a passage")
    parser.add_argument("--passages", type=int, default=3072, help="passages of the corpus")
    parser.add_argument("--queries", type=int, default=80)
    parser.add_argument("--query-words", type=int, default=50, help="a query is the first words of a passage")
    parser.add_argument("--seed", type=int, default=0)
    chosen = parser.parse_args()
    documents = []
    for path in chosen.documents:
        content = path.read_bytes()
        if path.suffix == ".gz":
            content = gzip.decompress(content)
        documents += [json.loads(line) for line in content.splitlines()]
    random = stream(chosen.seed, "passages")
    order = [int(i) for i in random.permutation(len(documents))]
    n_other, n_same = chosen.queries // 4, chosen.queries - chosen.queries // 4

    pieces: list[tuple[str, str]] = []  # of the corpus's articles
    taken = 0
    for number in order:
        if len(pieces) >= chosen.passages + n_same:
            break
        taken += 1
        cuts = cut(documents[number]["text"], chosen.words)
        pieces += [(f"{documents[number]['id']}/{place:03d}", text) for place, text in enumerate(cuts)]
    pieces = pieces[: chosen.passages + n_same]
    others = []
    for number in order[taken:]:
        cuts = cut(documents[number]["text"], chosen.words)
        place = int(random.integers(len(cuts)))
        others.append((f"other/{documents[number]['id']}/{place:03d}", cuts[place]))
    others = others[:n_other]
    if len(others) < n_other:
        parser.error(f"only {len(others)} documents are left for queries of other articles: fewer --passages")
    held = {int(i) for i in random.permutation(len(pieces))[:n_same]}
    queries = [(f"same/{pieces[i][0]}", pieces[i][1]) for i in sorted(held)] + others

    chosen.out.mkdir(parents=True, exist_ok=True)
    for name, rows in (("corpus", [p for i, p in enumerate(pieces) if i not in held]), ("queries", queries)):
        if name == "queries":
            rows = [(key, " ".join(text.split()[: chosen.query_words])) for key, text in rows]
        lines = [json.dumps({"id": key, "text": text}, ensure_ascii=False) for key, text in rows]
        (chosen.out / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
