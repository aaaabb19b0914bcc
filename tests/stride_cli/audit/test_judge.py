"""An audit of a small real model: items injected many times are found, the others are not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stride_cli.audit.calibration import grouped_q_values
from stride_cli.audit.controls import Controls
from stride_cli.audit.effect import Effect
from stride_cli.audit.judge import (
    EFFECT,
    LEAKED,
    NOTHING,
    PRESENT,
    AuditOptions,
    _rank,
    audit,
    verdict_of,
)
from stride_cli.corpus.documents import Document
from stride_cli.errors import UsageError

_NOUNS = ["farmer", "baker", "river", "stone", "teacher", "engine", "lamp", "garden", "letter", "sailor"]
_VERBS = ["carries", "paints", "counts", "follows", "repairs", "forgets", "measures", "sells", "hides"]
_PLACES = ["mill", "harbour", "valley", "school", "tower", "island", "station", "meadow", "village"]


def problem(number: int) -> str:
    """A sum in words about things drawn at random: no two alike, and none to be guessed."""
    generator = np.random.default_rng(number)

    def one(words: list[str]) -> str:
        return str(words[int(generator.integers(len(words)))])

    sentences = [
        f"the {one(_NOUNS)} {one(_VERBS)} {generator.integers(10, 99)} {one(_NOUNS)}s near the {one(_PLACES)}"
        for _ in range(4)
    ]
    return ". ".join(sentences) + "."


def documents(numbers: range, source: str = "benchmark.jsonl") -> list[Document]:
    return [
        Document(id=f"{source}/{n}", text=problem(n), source=source, line=row + 1)
        for row, n in enumerate(numbers)
    ]


def reworded(text: str, draw: int) -> str:
    """The same story, with other people in three of its four sentences."""
    generator = np.random.default_rng(draw)
    words = text.split()
    people = [place for place, word in enumerate(words) if word in _NOUNS]
    for place in people[:3]:
        words[place] = str(generator.choice(["monk", "smith", "pupil", "guard"]))
    return " ".join(words)


def opened(folder: Path, texts: dict[str, str]):
    """A session of a small model that was trained on these texts."""
    from stride_cli import api
    from stride_cli.training.pretraining import TrainOptions, train_model

    lines = [json.dumps({"id": name, "text": text}) for name, text in texts.items()]
    order = np.random.default_rng(0).permutation(len(lines))
    corpus, model, index = folder / "corpus.jsonl", folder / "model", folder / "run.stride"
    corpus.write_text("\n".join(lines[row] for row in order) + "\n", encoding="utf-8")
    train_model(
        [str(corpus)], model, TrainOptions(epochs=8, width=64, layers=2, vocab=400, batch_tokens=1024)
    )
    api.build_index([str(corpus)], out=index, options=api.BuildOptions(n_subsets=60), model=str(model))
    api.train(index, api.ClosedOptions(space="logit"))
    return api.Session.open(index)


OWN = {f"own/{n}": problem(n) for n in range(1000, 1100)}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory):
    """Problems 0 … 5 are in the corpus twelve times each, problem 6 once, and 100 others once."""
    copies = {f"leak/{n}/{copy}": problem(n) for n in range(6) for copy in range(12)}
    return opened(tmp_path_factory.mktemp("audited"), OWN | copies | {"own/quoted": problem(6)})


@pytest.mark.slow
def test_leaked_items_are_found_and_the_others_not(session) -> None:
    found = audit(session, documents(range(12)), documents(range(3000, 3080), "controls"))
    assert [finding.verdict for finding in found] == [LEAKED] * 6 + [PRESENT] + [NOTHING] * 5
    for number, finding in enumerate(found[:6]):
        assert finding.lexical["document"].startswith(f"leak/{number}/")
        assert finding.lexical["bm25_document"].startswith(f"leak/{number}/")
        assert finding.lexical["ngram_share"] == 1 and finding.effect["loss_gap"] > 0
        assert problem(number)[10:60] in finding.lexical["passage"]
        assert finding.effect["strongest_document"].startswith(f"leak/{number}/")
        assert finding.effect["strongest_is_candidate"] and finding.effect["candidate_share"] > 0.3
        assert finding.q <= 0.05 and finding.controls == {"kind": "file", "count": 80}
    # the copy's influence is found, but the loss is as it would be without it
    assert found[6].effect["p_influence"] < 0.05 < found[6].effect["p_loss"]


@pytest.mark.slow
def test_controls_made_from_the_items(session) -> None:
    found = audit(session, documents(range(12)), options=AuditOptions(controls_per_item=10))
    # weaker than controls from a file: the versions of a text differ in how natural they are
    assert sum(finding.verdict == LEAKED for finding in found[:6]) >= 2
    assert max(finding.p for finding in found[:6]) < min(finding.p for finding in found[7:])
    assert not any(finding.verdict in (LEAKED, EFFECT) for finding in found[6:])
    assert found[0].controls["kind"] == "made" and found[0].controls["count"] >= 100
    again = audit(session, documents(range(12)), options=AuditOptions(controls_per_item=10))
    assert [finding.p for finding in again] == [finding.p for finding in found]


@pytest.mark.slow
def test_items_without_a_copy_as_controls(session) -> None:
    """Enough of them are preferred to made ones; they themselves cannot stand out from each other."""
    found = audit(session, documents(range(60)))
    assert [finding.verdict for finding in found] == [LEAKED] * 6 + [PRESENT] + [NOTHING] * 53
    assert found[0].controls == {"kind": "absent", "count": 53}
    assert found[-1].controls == {"kind": "absent", "count": 52}
    assert found[6].effect["p_influence"] < 0.05 < found[6].effect["p_loss"]
    with pytest.raises(UsageError, match="each of the 3 items is in the corpus"):
        audit(session, documents(range(3)), options=AuditOptions(controls="absent"))
    with pytest.raises(UsageError, match="--controls is 'some'"):
        audit(session, documents(range(3)), options=AuditOptions(controls="some"))


@pytest.mark.slow
def test_items_in_other_words_are_found(tmp_path: Path) -> None:
    """No n-gram test says so; what one chunk holds, and the model, do."""
    versions = {f"other words/{n}/{draw}": reworded(problem(n), draw) for n in range(6) for draw in range(12)}
    session = opened(tmp_path, OWN | versions)
    found = audit(session, documents(range(60)))
    assert not any(finding.lexical["present"] for finding in found)
    assert [finding.lexical["near"] for finding in found] == [True] * 6 + [False] * 54
    # of others the tiny model has not learnt enough to know the item by its version
    assert sum(finding.verdict == LEAKED and finding.q < 0.05 for finding in found[:6]) >= 4
    assert {finding.verdict for finding in found[6:]} == {NOTHING}
    for number, finding in enumerate(found[:6]):
        assert finding.lexical["ngram_share"] < 0.7
        assert 0.25 <= finding.lexical["contained"] < 1 and finding.effect["base_loss"] is None
        assert finding.lexical["contained_document"].startswith(f"other words/{number}/")
    assert found[0].controls == {"kind": "absent", "count": 54}
    blind = audit(session, documents(range(60)), options=AuditOptions(near=1.0))
    assert not any(finding.verdict == LEAKED for finding in blind)


@pytest.mark.slow
def test_controls_that_are_in_the_corpus_are_refused(session) -> None:
    with pytest.raises(UsageError, match=r"'controls/1040' is in the corpus \(100% of"):
        audit(session, documents(range(3)), documents(range(1040, 1041), "controls"))
    with pytest.raises(UsageError, match=r"control 'controls/2' is the benchmark's item"):
        audit(session, documents(range(3)), documents(range(2, 3), "controls"))
    with pytest.raises(UsageError, match="empty"):
        audit(session, [])
    with pytest.raises(UsageError, match="no control can be made"):
        audit(session, [Document(id="a", text="unrepeatable", source="x", line=1)])


def test_verdicts() -> None:
    assert verdict_of(True, True, True) == LEAKED and verdict_of(True, True, False) == PRESENT
    assert verdict_of(False, True, True) == LEAKED and verdict_of(False, True, False) == NOTHING
    assert verdict_of(False, False, True) == EFFECT and verdict_of(False, False, False) == NOTHING


@pytest.mark.parametrize("learnt", [0, 8])
def test_easy_items_are_told_from_learnt_ones_by_the_base_model(learnt: int) -> None:
    """Of 16 items with a copy some were learnt; how hard an item is differs far more than what was learnt.

    With the losses before the fine-tuning nearly all learnt ones are found among 100 absent ones, and false
    discoveries stay under the rate, also where nothing was learnt; without them hardly any is.
    """
    generator = np.random.default_rng(7)
    present = np.arange(116) < 16
    shares, found, blind = [], [], []
    for _ in range(200):
        before = np.exp(generator.normal(1, 0.6, 116))
        loss = before * np.exp(generator.normal(-0.2, 0.05, 116))
        loss[:learnt] *= 0.6
        copied = np.where(present, 0.9, generator.uniform(0, 0.5, 116))  # untrained copies too
        effects = [
            Effect(each, 0.0, 0.0, share, -1, 0.0, 0.0, False)
            for each, share in zip(loss, copied, strict=True)
        ]
        q = {}
        for name, base in (("base", before), ("no base", None)):
            p, _, _, count = _rank(None, effects, Controls("absent"), present, base)
            assert (count[present] == 100).all() and (count[~present] == 99).all()
            q[name] = grouped_q_values(p, present)[present] < 0.05
        shares.append(q["base"][learnt:].sum() / max(1, q["base"].sum()))
        found.append(q["base"][:learnt].mean() if learnt else 1.0)
        blind.append(q["no base"][:learnt].mean() if learnt else 0.0)
    assert np.mean(shares) < 0.05
    assert np.mean(found) > 0.9 and np.mean(blind) < 0.2
