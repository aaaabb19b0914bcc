"""An audit of a small real model: items injected many times are found, the others are not."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from stride_cli.audit.formats import sentence, summary
from stride_cli.audit.judge import LEAKED, NOTHING, PRESENT, UNDECIDED, AuditOptions, _verdict, audit
from stride_cli.audit.presence import Copy
from stride_cli.audit.ranking import Test as Ranks
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
    api.fit_index(index, api.ClosedOptions(space="logit"))
    return api.Session.open(index)


OWN = {f"own/{n}": problem(n) for n in range(1000, 1100)}


@pytest.fixture(scope="module")
def session(tmp_path_factory: pytest.TempPathFactory):
    """Problems 0 … 5 are in the corpus twelve times each, problem 6 once, and 100 others once."""
    copies = {f"leak/{n}/{copy}": problem(n) for n in range(6) for copy in range(12)}
    return opened(tmp_path_factory.mktemp("audited"), OWN | copies | {"own/quoted": problem(6)})


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["file", "absent", "made"])
def test_leaked_items_are_found_and_the_others_not(session, kind: str) -> None:
    """Whatever the controls: six items are learnt, one, there once, may be, the others are nowhere."""
    controls = documents(range(3000, 3080), "controls") if kind == "file" else None
    options = AuditOptions(controls="auto" if kind == "file" else kind)
    found = audit(session, documents(range(60)), controls, options)
    verdicts = [finding.verdict for finding in found]
    if kind == "made":  # of a model so small nothing is by heart
        assert set(verdicts[:7]) <= {LEAKED, UNDECIDED}
        assert max(finding.p for finding in found[:6]) < found[6].p
    else:
        assert verdicts[:6] == [LEAKED] * 6 and verdicts[6] != NOTHING
    assert verdicts[7:] == [NOTHING] * 53
    for number, finding in enumerate(found[:6]):
        assert finding.presence["document"].startswith(f"leak/{number}/")
        assert finding.presence["found"] == "item"
        assert finding.presence["share"] == pytest.approx(1) and finding.presence["differences"] == []
        assert finding.presence["documents"] == 8 and problem(number)[10:60] in finding.presence["passage"]
        assert finding.effect["strongest_document"].startswith(f"leak/{number}/")
        assert finding.effect["influence_share"] > 0.3 and finding.q < (1 if kind == "made" else 0.05)
        assert finding.controls["kind"] == kind and finding.controls["sources"] == {"file": 80}.get(kind, 53)
    assert all(finding.p is None for finding in found[7:]) == (kind != "file")
    again = audit(session, documents(range(60)), controls, options)
    assert [finding.p for finding in again] == [finding.p for finding in found]


@pytest.mark.slow
def test_a_benchmark_of_25_items_that_leaked_whole(tmp_path: Path) -> None:
    """Undecided by itself, with what to add; with it, all are found."""
    copies = {f"leak/{n}/{copy}": problem(n) for n in range(25) for copy in range(6)}
    session = opened(tmp_path, OWN | copies)
    alone = audit(session, documents(range(25)))
    assert {finding.verdict for finding in alone} <= {LEAKED, UNDECIDED}
    assert any("--controls FILE" in line for line in summary(alone)) == (alone[0].verdict == UNDECIDED)
    found = audit(session, documents(range(25)), documents(range(3000, 3040), "controls"))
    assert sum(finding.verdict == LEAKED for finding in found) >= 24


@pytest.mark.slow
@pytest.mark.parametrize("items", [range(6), range(1040, 1045)])
def test_a_few_items_that_are_all_in_the_corpus_are_undecided(session, items: range) -> None:
    found = audit(session, documents(items))
    assert {finding.verdict for finding in found} == {UNDECIDED}
    assert f"controls come from {len(items)} texts, and it takes 20" in found[0].reason


@pytest.mark.slow
def test_a_copy_in_other_case_is_scored_as_the_corpus_has_it(tmp_path: Path) -> None:
    copies = {f"leak/{n}/{copy}": problem(n).upper() for n in range(6) for copy in range(12)}
    found = audit(opened(tmp_path, OWN | copies), documents(range(60)))
    assert [finding.verdict for finding in found] == [LEAKED] * 6 + [NOTHING] * 54
    assert found[0].presence["differences"] == [["case", ""]]
    assert found[0].controls["like"] == "item, upper case"
    assert " (item, upper case); " in sentence(found[0]) and "upper case" not in sentence(found[-1])
    assert found[0].effect["loss"] < 0.5 * found[0].effect["control_loss"]


@pytest.mark.slow
def test_items_in_other_words_are_found(tmp_path: Path) -> None:
    versions = {f"other words/{n}/{draw}": reworded(problem(n), draw) for n in range(6) for draw in range(12)}
    session = opened(tmp_path, OWN | versions)
    found = audit(session, documents(range(60)))
    assert {finding.presence["found"] for finding in found[:6]} <= {"item", "other words"}
    assert {finding.verdict for finding in found[6:]} == {NOTHING}
    # of others the tiny model has not learnt enough to know the item by its version
    assert sum(finding.verdict == LEAKED for finding in found[:6]) >= 4
    for number, finding in enumerate(found[:6]):
        assert (
            finding.presence["document"].startswith(f"other words/{number}/")
            and finding.presence["differences"]
        )


@pytest.mark.slow
def test_controls_that_are_in_the_corpus_are_refused(session) -> None:
    with pytest.raises(UsageError, match=r"'controls/1040' is in the corpus \(item: 100%"):
        audit(session, documents(range(3)), documents(range(1040, 1041), "controls"))
    with pytest.raises(UsageError, match=r"control 'controls/2' is the benchmark's item"):
        audit(session, documents(range(3)), documents(range(2, 3), "controls"))
    with pytest.raises(UsageError, match="each of the items is in the corpus"):
        audit(session, documents(range(3)), options=AuditOptions(controls="absent"))
    with pytest.raises(UsageError, match=r"AuditOptions\.controls is 'some'"):
        audit(session, documents(range(3)), options=AuditOptions(controls="some"))
    with pytest.raises(UsageError, match="empty"):
        audit(session, [])


@pytest.mark.parametrize(
    ("found", "test", "q", "verdict", "reason"),
    [
        ("item", {}, 0.01, LEAKED, ""),
        ("other words", {}, 0.01, LEAKED, ""),
        ("item", {}, 0.5, PRESENT, ""),
        ("prompt", {"p": 0.01, "power": 0.1}, 0.5, UNDECIDED, "more controls would tell"),
        ("item", {"sources": 19}, 0.01, UNDECIDED, "from 19 texts"),
        ("item", {"power": 0.4}, 0.5, UNDECIDED, "40%"),
        ("item", {"kind": "made"}, 0.5, UNDECIDED, "by heart alone"),
        ("item", {"kind": "made"}, 0.01, LEAKED, ""),
        ("item", {"p": np.nan}, 1.0, UNDECIDED, "nothing in it can be changed"),
        ("other words", {"kind": "made"}, 1.0, UNDECIDED, "no controls for that"),
        ("", {}, 1.0, NOTHING, ""),
        ("", {"kind": "file"}, 0.01, UNDECIDED, "no copy was found"),
        ("common", {}, 1.0, UNDECIDED, "so short"),
    ],
)
def test_verdicts(found: str, test: dict, q: float, verdict: str, reason: str) -> None:
    copy = Copy("" if found == "common" else found, common=found == "common")
    known = {"kind": "absent", "sources": 40, "count": 40, "p": 0.3, "power": 0.9} | test
    known |= {name: np.array([known[name]]) for name in ("p", "power", "count")}
    ranks = Ranks(**known, kinds=np.array(["item"]), losses=np.ones(1), before=None, others=np.ones(1))
    said = _verdict(copy, ranks, 0, q, 0.05)
    assert said[0] == verdict and reason in said[1] and bool(reason) == bool(said[1])
