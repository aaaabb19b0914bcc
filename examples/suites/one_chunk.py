"""Cut queries to what one chunk of an index holds, by tokens of its model; the others stay as they are.

    python examples/suites/one_chunk.py queries.jsonl --index run.stride --model model

How many tokens a word takes depends on the tokenizer, which is trained after the queries are chosen. The file
is replaced whole, and only where a query is too long.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from index_format.reader import Index
from stride_cli.corpus.chunking import DocumentTokenizer
from stride_cli.corpus.documents import Document
from stride_cli.models.language.checkpoint import load_tokenizer


def shorten(text: str, cutter: DocumentTokenizer) -> str:
    """The longest beginning of the text, cut between tokens, that is one chunk."""

    def tokens(piece: str) -> int:
        (encoded,) = cutter.encode_batch([Document("query", text=piece)])
        return sum(len(chunk.tokens) for chunk in cutter.chunks(encoded))

    if tokens(text) <= cutter.block_size:
        return text
    found = cutter.tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    ends = [end for _, end in found["offset_mapping"]][: cutter.block_size]
    # the beginning alone may be read as other tokens than within the text, and a first token may be added
    while len(ends) > 1 and tokens(text[: ends[-1]]) > cutter.block_size:
        ends.pop()
    return text[: ends[-1]]


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("queries", type=Path, help="JSON Lines of {id, text}")
    parser.add_argument("--index", type=Path, required=True)
    parser.add_argument("--model", required=True)
    chosen = parser.parse_args()
    cutter = DocumentTokenizer(
        load_tokenizer(chosen.model), block_size=Index.open(chosen.index).attributes["block_size"]
    )
    rows = [json.loads(line) for line in chosen.queries.read_text(encoding="utf-8").splitlines()]
    cut = [{**row, "text": shorten(row["text"], cutter)} for row in rows]
    changed = sum(row != before for row, before in zip(cut, rows, strict=True))
    if changed:
        fresh = chosen.queries.with_suffix(".new")
        fresh.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in cut), encoding="utf-8")
        fresh.replace(chosen.queries)
        print(f"{changed} of {len(rows)} queries cut to {cutter.block_size} tokens", file=sys.stderr)


if __name__ == "__main__":
    main()
