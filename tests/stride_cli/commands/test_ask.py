"""`stride ask`: builds what is missing, once, and answers as `stride query` does."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from transformers import AutoTokenizer

PROMPT = "Ada number 0 lives in"


@pytest.fixture(scope="module")
def built(run: Callable, corpus: str, saved_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with corpus.jsonl, and the index that the first question has made beside it."""
    folder = tmp_path_factory.mktemp("ask") / "a folder"
    folder.mkdir()
    shutil.copyfile(corpus, folder / "corpus.jsonl")
    asked = run(f"ask '{folder}/corpus.jsonl' --model {saved_model} '{PROMPT}' --top 2")
    assert asked.code == 0, asked.err
    (folder / "first.json").write_text(json.dumps([asked.out, asked.err]))
    return folder


def test_the_first_question_builds_all_and_says_so(built: Path, run: Callable, saved_model: Path) -> None:
    out, err = json.loads((built / "first.json").read_text())
    assert json.loads(out)["verdict"] is not None and len(json.loads(out)["hits"]) == 2
    assert "one operator for each of 30 subsets of 30 chunks, once only; Ctrl-C keeps" in err
    # then it answers at once, without the model, as a query does
    again = run(f"ask '{built}/corpus.jsonl' '{PROMPT}' --top 2")
    queried = run(f"query '{PROMPT}' --index '{built}/corpus.stride' --top 2")
    first, second, third = (json.loads(text) for text in (out, again.out, queried.out))
    for record in (first, second, third):
        del record["seconds"]
    assert again.err == "" and first == second == third
    # the tokens that a query has, and those that are scored
    shown = run(f"query '{PROMPT}' --response Rome --index '{built}/corpus.stride' --show-tokens").records[0]
    own = AutoTokenizer.from_pretrained(saved_model)(f"{PROMPT} Rome", add_special_tokens=False).input_ids
    assert shown["ids"][-len(own) :] == own and "".join(shown["pieces"]).endswith(f"{PROMPT} Rome")
    scored = [piece for piece, each in zip(shown["pieces"], shown["scored"], strict=True) if each]
    assert "".join(scored) == shown["response"] == " Rome"
    refused = run(f"query - --pool --show-tokens --index '{built}/corpus.stride'", stdin=PROMPT)
    assert refused.code == 2 and "--show-tokens gives no answers" in refused.err
    several = run(
        f"ask '{built}/corpus.jsonl' - --top 1", stdin=f'{PROMPT}\n{{"prompt": "Bela", "id": "b"}}\n'
    )
    assert [record.get("id") for record in several.records] == [None, "b"]
    # and it takes what a query takes
    (built / "two.jsonl").write_text(f'{{"prompt": "{PROMPT}"}}\n{{"prompt": ""}}\n')
    for more in (
        "--pool --on-bad skip --format csv",
        "--response Rome --instead Oslo --on-bad record --json",
    ):
        asked = f"--file '{built}/two.jsonl' {more} --top 2 --index '{built}/corpus.stride'"
        first, second = (run(line) for line in (f"ask '{built}/corpus.jsonl' {asked}", f"query {asked}"))
        outs = [re.sub(r'"seconds": {.*?}', "", each.out).splitlines() for each in (first, second)]
        assert outs[0] == outs[1] and len(outs[0]) > 1 and first.code == second.code == 2
        assert first.err == second.err and "1 bad prompt in all" in first.err


def test_documents_added_to_the_corpus_are_added_to_the_index(
    built: Path, run: Callable, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(built, tmp_path / "grown"))
    new = '{"id": "new", "text": "Zoe number 99 lives in Rome"}\n'
    with (folder / "corpus.jsonl").open("a") as lines:
        lines.write(new)
    shutil.copytree(folder / "corpus.stride", own := tmp_path / "own.stride")
    assert run(f"train --rank 8 --project 64 --overwrite --no-calibration --index {own}").code == 0
    for documents in (30, 31):
        refused = run(f"ask {folder}/corpus.jsonl Zoe --index {own}")
        assert refused.code == 2 and "settings of their own" in refused.err and "ranks" in refused.err
        assert run(f"index info {own}").records[0]["documents"] == documents
        run(f"index append - --index {own}", stdin=new)
    asked = run(f"ask {folder}/corpus.jsonl 'Zoe number 99 lives in' --top 40 --bottom 40")
    assert asked.code == 0 and "adding 1 new documents to the index" in asked.err
    (answer,) = asked.records
    assert answer["measurement"]["coverage"] == 1 and answer["verdict"] is not None
    assert "new" in {hit["document"] for hit in answer["hits"] + answer["opposers"]}
    assert run(f"index info {folder}/corpus.stride").records[0]["documents"] == 31
    # the index is the same as if it had been built of all of them, but for K
    assert run(f"index verify {folder}/corpus.stride --json").code == 0


def test_another_corpus_or_model_is_told_and_nothing_is_lost(
    built: Path, run: Callable, saved_model: Path, tmp_path: Path
) -> None:
    changed = (built / "corpus.jsonl").read_text().replace("Ada", "Ado", 1)
    (tmp_path / "changed.jsonl").write_text(changed)
    before = sorted(path.stat().st_mtime_ns for path in (built / "corpus.stride").rglob("*"))
    refused = run(f"ask {tmp_path}/changed.jsonl X --index '{built}/corpus.stride'")
    assert refused.code == 2 and "is of another corpus" in refused.err and "--index OTHER" in refused.err
    other = Path(shutil.copytree(saved_model, tmp_path / "other"))
    import safetensors.torch

    weights = safetensors.torch.load_file(other / "model.safetensors")
    weights["lm_head.weight"] *= 2
    safetensors.torch.save_file(weights, other / "model.safetensors", metadata={"format": "pt"})
    refused = run(f"ask '{built}/corpus.jsonl' X --model {other}")
    assert refused.code == 3 and "was built for another model" in refused.err
    assert "--index OTHER.stride" in refused.err
    assert before == sorted(path.stat().st_mtime_ns for path in (built / "corpus.stride").rglob("*"))
