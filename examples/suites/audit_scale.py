"""Time and memory of `stride audit` looking for 1,000 problems in a corpus of a million short documents.

    python examples/suites/audit_scale.py gsm8k_train.jsonl.gz gsm8k_test.jsonl.gz --model MODEL --work NEW

A document is some sentences of different training problems with longer numbers. Half of the problems are in
the corpus once. With --instruct all documents, and all problems, begin alike. Prints processor seconds, and
the peak of memory in MB, of building the index and of finding the problems, each in a process of its own; and
how many of those that are there are found, and of the others.
"""

from __future__ import annotations

import argparse
import json
import re
import resource
import subprocess
import sys
from pathlib import Path

from audit_matrix import INSTRUCTIONS
from planted import read_rows

from stride_cli.randomness import stream


def write_corpus(chosen: argparse.Namespace) -> None:
    random = stream(0, "audit scale")
    begin = f"{INSTRUCTIONS[0]} " if chosen.instruct else ""
    pieces = [re.split(r"(?<=[.?]) ", row["prompt"]) for row in read_rows(chosen.train)]
    sentences = [each for own in pieces for each in own]
    items = [begin + row["prompt"] + " " + row["response"] for row in read_rows(chosen.test)[: chosen.items]]
    planted = random.choice(chosen.documents, len(items) // 2, replace=False).tolist()
    where = dict(zip(planted, items[::2], strict=False))
    with (chosen.work / "corpus.jsonl").open("w", encoding="utf-8") as file:
        for number in range(chosen.documents):
            drawn = " ".join(sentences[i] for i in random.integers(len(sentences), size=chosen.sentences))
            text = begin + re.sub(r"\d+", f"\\g<0>{number % 97}", drawn)
            file.write(json.dumps({"id": str(number), "text": where.get(number, text)}) + "\n")
    (chosen.work / "items.json").write_text(json.dumps(items), encoding="utf-8")


def build(chosen: argparse.Namespace) -> dict[str, float]:
    from stride_cli import api

    corpus, out = [str(chosen.work / "corpus.jsonl")], chosen.work / "run.stride"
    api.build_index(corpus, model=str(chosen.model), out=out, options=api.BuildOptions(n_subsets=60))
    return {}


def find(chosen: argparse.Namespace) -> dict[str, float]:
    from transformers import AutoTokenizer

    from index_format.reader import Index
    from stride_cli.audit.options import AuditOptions
    from stride_cli.audit.presence import find_copies

    items = json.loads((chosen.work / "items.json").read_text(encoding="utf-8"))
    index, tokenizer = Index.open(chosen.work / "run.stride"), AutoTokenizer.from_pretrained(chosen.model)
    copies = find_copies(index, tokenizer, [[item] for item in items], AuditOptions())
    found = [bool(copy.found) for copy in copies]
    return {"found": sum(found[::2]), "of": len(found[::2]), "others_found": sum(found[1::2])}


STEPS = {"build": build, "find": find}


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("train", type=Path)
    parser.add_argument("test", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--work", type=Path, required=True, help="an empty folder")
    parser.add_argument("--documents", type=int, default=1_000_000)
    parser.add_argument("--sentences", type=int, default=3, help="of a document")
    parser.add_argument("--items", type=int, default=1_000)
    parser.add_argument("--instruct", action="store_true")
    parser.add_argument("--step", choices=STEPS, help="only this, of a folder that is there")
    chosen = parser.parse_args()
    if chosen.step:
        found = STEPS[chosen.step](chosen)
        used = resource.getrusage(resource.RUSAGE_SELF)
        found |= {"seconds": used.ru_utime + used.ru_stime, "mb": used.ru_maxrss / 1024}
        sys.stdout.write(json.dumps(found) + "\n")
        return
    chosen.work.mkdir(parents=True, exist_ok=True)
    write_corpus(chosen)
    record = {"table": "scale", "documents": chosen.documents, "items": chosen.items}
    size = (chosen.work / "corpus.jsonl").stat().st_size
    record |= {"sentences": chosen.sentences, "instruct": chosen.instruct, "corpus_mb": size / 1e6}
    for step in STEPS:
        done = subprocess.run([sys.executable, *sys.argv, "--step", step], stdout=subprocess.PIPE, check=True)
        record[step] = json.loads(done.stdout)
    sys.stdout.write(json.dumps(record) + "\n")


if __name__ == "__main__":
    main()
