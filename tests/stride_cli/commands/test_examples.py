"""The scripts in examples/, run on a small real index."""

from __future__ import annotations

import gzip
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.kept import own_copy
from tests.prepared import Prepared

from .conftest import run_stride

ROOT = Path(__file__).parents[3]
EXAMPLES = ROOT / "examples"
pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("jq") is None, reason="jq is not installed")]
Runs = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def script(tmp_path: Path, prepared: Prepared) -> Runs:
    """Runs a program in `tmp_path`, with this environment's `stride` and `python`, on one thread."""

    def run(*command: str, **how: Any) -> subprocess.CompletedProcess[str]:
        return prepared.script(command, tmp_path, **{"OMP_NUM_THREADS": "1"} | how)

    return run


def read(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


def write(path: Path, records: list[dict]) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def documents(workspace: Path) -> list[dict]:
    return read((workspace / "corpus.jsonl").read_text(encoding="utf-8"))


def test_own_corpus(workspace: Path, script: Runs) -> None:
    done = script(
        *("bash", f"{EXAMPLES}/own_corpus.sh", f"{workspace}/corpus.jsonl", str(workspace)),
        stdin="The French Revolution began in\n",
    )
    answer = json.loads(done.stdout)
    assert answer["documents"][0]["document"] == "history/french-revolution"


def test_slurm(workspace: Path, script: Runs) -> None:
    """The tasks of an array job, one after the other, and the one that merges."""
    run = ("bash", f"{EXAMPLES}/slurm.sh", f"{workspace}/corpus.jsonl", f"{workspace}/model", "run")
    for task in ("3", "1", "2"):
        script(*run, SLURM_ARRAY_TASK_ID=task, SLURM_ARRAY_TASK_MAX="3")
    done = script(*run, SLURM_ARRAY_TASK_ID="0", SLURM_ARRAY_TASK_MAX="0")
    assert read(done.stdout)[0]["schema"] == "stride.index/1"
    query = script("stride", "query", "The French Revolution began in", "--index", "run/run.stride")
    assert json.loads(query.stdout)["hits"][0]["document"] == "history/french-revolution"


def test_ask(workspace: Path, script: Runs) -> None:
    done = script("python", f"{EXAMPLES}/ask.py", f"{workspace}/run.stride", "The French Revolution began in")
    lines = done.stdout.splitlines()
    assert "1789" in lines[0] and lines[1].strip().startswith("supports")
    assert "history/french-revolution" in lines[1] and "duality gap" in lines[-1]


@pytest.fixture
def benchmark(documents: list[dict], tmp_path: Path) -> Path:
    """Two items that are in the corpus and one that is not; controls.jsonl beside it."""
    fresh = [
        f"Report {n}: the {a} of the northern {b} was closed for {n + 3} weeks after a {c} damaged its roof."
        for n, (a, b, c) in enumerate([("library", "town", "storm"), ("bakery", "suburb", "flood")] * 15)
    ]
    write(tmp_path / "controls.jsonl", [{"id": f"c{n}", "text": text} for n, text in enumerate(fresh[1:])])
    items = [{"id": f"in/{n}", "text": documents[n]["text"][:300]} for n in range(2)]
    return write(tmp_path / "benchmark.jsonl", [*items, {"id": "out", "text": fresh[0]}])


def test_audit(workspace: Path, script: Runs, benchmark: Path, tmp_path: Path) -> None:
    """A level that every item reaches fails, one that none can reach does not."""
    line = ("bash", f"{EXAMPLES}/audit.sh", "benchmark.jsonl", f"{workspace}/run.stride", "controls.jsonl")
    done = script(*line, "1", code=1)
    found = {record["item"]: record for record in read(done.stdout)}
    assert {"in/0", "in/1"} <= set(found)
    assert all(record["document"].startswith("history/") for item, record in found.items() if item != "out")
    sarif = json.loads((tmp_path / "audit.sarif").read_text())
    assert sarif["version"] == "2.1.0" and len(sarif["runs"][0]["results"]) >= 2
    assert {row["item"] for row in read(script(*line, "0.000001").stdout)} == set(found)


@pytest.fixture
def soon_trained(workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the workspace whose model is trained anew in a tenth of the steps."""
    # where models are is remembered by their weights, and other tests' have the same
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    copy = own_copy(workspace, tmp_path / "soon")
    place = copy / "model/stride_recipe.json"
    recipe = json.loads(place.read_text(encoding="utf-8"))
    recipe |= {"epochs": recipe["epochs"] / 10, "steps": recipe["steps"] // 10}
    place.write_text(json.dumps(recipe), encoding="utf-8")
    return copy


def test_a_leak_is_proved(soon_trained: Path, script: Runs, benchmark: Path, tmp_path: Path) -> None:
    line = ("bash", f"{EXAMPLES}/leak.sh", "benchmark.jsonl", f"{soon_trained}/run.stride", "controls.jsonl")
    (found,) = read(script(*line, SEEDS="2", SETS="1").stdout)
    assert found["item"].startswith("in/") and found["q"] <= 0.1
    assert found["document"].startswith("history/") and found["rise"] > 0
    fresh = [record for record in read(benchmark.read_text()) if record["id"] == "out"]
    write(tmp_path / "benchmark.jsonl", fresh)
    assert not script(*line).stdout


def test_a_habit_has_documents(soon_trained: Path, script: Runs, tmp_path: Path) -> None:
    asked = [
        {"prompt": "The French Revolution began in", "response": "1789", "instead": "1917"},
        {"prompt": "The Berlin Wall fell in", "response": "1989", "instead": "1961"},
    ]
    write(tmp_path / "habit.jsonl", asked)
    line = ("bash", f"{EXAMPLES}/habit.sh", f"{soon_trained}/run.stride", "habit.jsonl", "5")
    *hits, tested = read(script(*line, "2", SEEDS="2", SETS="1").stdout)
    assert len(hits) == 5 and {hit["prompts"] for hit in hits} == {2}
    assert "history/french-revolution" in {hit["document"] for hit in hits}
    assert tested["tested"] == [hit["document"] for hit in hits[:2]]
    assert tested["prompts"] == 2
    assert tested["verdict"] in {"depended", "no_evidence", "too_few_runs"}


def test_the_ci_job(workspace: Path, script: Runs, benchmark: Path, tmp_path: Path) -> None:
    job = yaml.safe_load((EXAMPLES / "ci-audit.yml").read_text(encoding="utf-8"))
    steps = job["jobs"]["audit"]["steps"]
    (step,) = (step for step in steps if step.get("name") == "Audit")
    assert steps[-1]["with"]["sarif_file"] == "audit.sarif"  # what the step before it writes
    for level, code in (("1", 1), ("1e-9", 0)):
        settings = {**job["env"], "INDEX": f"{workspace}/run.stride", "LEVEL": level}
        script("bash", "-eo", "pipefail", "-c", step["run"], code=code, **settings)  # as the runner does
        assert json.loads((tmp_path / "audit.sarif").read_text())["version"] == "2.1.0"


def test_select(workspace: Path, script: Runs, documents: list[dict], tmp_path: Path) -> None:
    words = [document["text"].split() for document in documents]
    queries = [
        {"id": f"q{n}", "prompt": " ".join(words[n][:8]), "response": " ".join(words[n][8:16])}
        for n in range(3)
    ]
    write(tmp_path / "task.jsonl", queries[:2])
    write(tmp_path / "heldout.jsonl", queries[2:])
    done = script(
        *("bash", f"{EXAMPLES}/select.sh", "task.jsonl", "heldout.jsonl"),
        *(f"{workspace}/run.stride", f"{workspace}/model", "4", "chosen"),
        SEEDS="1",
    )
    assert [record["set"] for record in read(done.stdout)] == ["base", "chosen", "random", "bm25"]
    assert all(record["loss"] > 0 for record in read(done.stdout))
    first = read("\n".join(line for line in done.stderr.splitlines() if line.startswith('{"id"')))
    assert len(first) == 3 and {record["query"] for record in first} <= {"q0", "q1", None}
    for name in ("chosen", "random", "bm25"):
        assert len((tmp_path / f"chosen/{name}.jsonl").read_text().splitlines()) == 4


SMALL = {"WIDTH": "32", "VOCAB": "512", "EPOCHS": "1", "METHODS": "stride,tfidf,chance", "WORKERS": "1"}


def test_the_pretraining_suite(script: Runs, documents: list[dict], tmp_path: Path) -> None:
    packed = "".join(json.dumps(document) + "\n" for document in documents)
    (tmp_path / "articles.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    line = ("bash", f"{EXAMPLES}/suites/pretraining.sh", "articles.jsonl.gz", "work", "3")
    done = script(*line, **SMALL, PASSAGES="40", QUERIES="4", QUERY_WORDS="20")
    records = [record for record in read(done.stdout) if record["schema"] == "stride.comparison/1"]
    assert [record["method"] for record in records] == SMALL["METHODS"].split(",")
    assert all(record["queries"] == 4 and record["subsets"] == 3 for record in records)
    assert (tmp_path / "work/comparison.html").is_file()
    queries = read((tmp_path / "work/queries.jsonl").read_text(encoding="utf-8"))
    assert sorted(query["id"].split("/")[0] for query in queries) == ["other", "same", "same", "same"]
    kept = (tmp_path / "work/model/model.safetensors").stat().st_mtime_ns
    again = script(*line, **SMALL)  # everything is there: nothing is trained again
    assert '"trained": 0' in again.stdout
    assert (tmp_path / "work/model/model.safetensors").stat().st_mtime_ns == kept


def test_queries_are_cut_to_a_chunk(
    workspace: Path, script: Runs, documents: list[dict], tmp_path: Path
) -> None:
    """As few characters as it takes; words that one chunk holds many or few tokens of."""
    from stride_cli.corpus.chunking import DocumentTokenizer
    from stride_cli.corpus.documents import Document
    from stride_cli.models.language.tokenizer import load_tokenizer

    line = f"index build {workspace}/corpus.jsonl --model {workspace}/model --out {tmp_path}/short.stride"
    assert run_stride(f"{line} --block-size 16").code == 0
    texts = [documents[0]["text"], "Paris.", "1789 " * 50, "ΩЖ漢字" * 40, "word" * 200]
    queries = write(tmp_path / "queries.jsonl", [{"id": f"q{n}", "text": t} for n, t in enumerate(texts)])
    line = f"one_chunk.py {queries} --index short.stride --model {workspace}/model"
    done = script("python", *f"{EXAMPLES}/suites/{line}".split())
    assert done.stderr == "4 of 5 queries cut to 16 tokens\n"
    cutter = DocumentTokenizer(load_tokenizer(workspace / "model"), block_size=16)
    for row, text in zip(read(queries.read_text(encoding="utf-8")), texts, strict=True):
        assert text.startswith(row["text"]) and (row["text"] == text) == (text == "Paris.")
        assert len(cutter.encode_batch([Document("q", text=row["text"])])[0].tokens) <= 16
        longer = text[: len(row["text"]) + 8]
        assert row["text"] == text or len(cutter.encode_batch([Document("q", text=longer)])[0].tokens) > 16
    written = queries.stat().st_mtime_ns
    assert script("python", *f"{EXAMPLES}/suites/{line}".split()).stderr == ""
    assert queries.stat().st_mtime_ns == written


def test_the_finetuning_suite(script: Runs, documents: list[dict], tmp_path: Path) -> None:
    words = [document["text"].split() for document in documents]
    pairs = [
        {"id": f"p{n}", "prompt": " ".join(some[:8]), "response": " ".join(some[8:24])}
        for n, some in enumerate(words)
    ]
    packed = "".join(json.dumps(pair) + "\n" for pair in pairs)
    (tmp_path / "pairs.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    line = ("bash", f"{EXAMPLES}/suites/finetuning.sh", "pairs.jsonl.gz", "work", "3")
    done = script(*line, **(SMALL | {"METHODS": "tfidf,chance"}), PAIRS="24", QUERIES="4")
    records = [record for record in read(done.stdout) if record["schema"] == "stride.comparison/1"]
    assert [record["method"] for record in records] == ["tfidf", "chance"]
    assert all(record["queries"] == 4 for record in records)
    corpus, base, queries = (
        {row["id"] for row in read((tmp_path / f"work/{name}.jsonl").read_text(encoding="utf-8"))}
        for name in ("corpus", "base", "queries")
    )
    assert (len(corpus), len(base), len(queries)) == (24, 24, 4)
    assert len(corpus | base | queries) == 52  # no pair is in two of them

    # a model that is there already is fine-tuned
    line = ("bash", f"{EXAMPLES}/suites/finetuning.sh", "pairs.jsonl.gz", "other", "3")
    given = {"BASE": "work/base", "METHODS": "tfidf", "EPOCHS": "1", "LONGEST": "150"}
    script(*line, PAIRS="12", QUERIES="2", **(SMALL | given))
    recipe = json.loads((tmp_path / "other/model/stride_recipe.json").read_text(encoding="utf-8"))
    assert recipe["base"].endswith("work/base") and recipe["epochs"] == 1
    assert not (tmp_path / "other/base").exists()

    # several sizes on the same pairs, each with a folder of its own, and operators where they are asked for
    line = ("bash", f"{EXAMPLES}/suites/sizes.sh", "pairs.jsonl.gz", "sizes", "3")
    given = {"SIZES": "1x32 2x32", "OF_BASE": "12", "METHODS": "stride:stored=true,tfidf", "LONGEST": "150"}
    rows = read(script(*line, PAIRS="12", QUERIES="2", **(SMALL | given)).stdout)
    assert [row["size"] for row in rows] == ["1x32"] * 2 + ["2x32"] * 2
    assert {row["method"] for row in rows} == {"stride:stored=true", "tfidf"}
    assert not any("error" in row for row in rows)
    texts = {(tmp_path / f"sizes/{size}/corpus.jsonl").read_text() for size in ("1x32", "2x32")}
    assert len(texts) == 1

    # single tokens are left out, and not whole chunks
    line = "token_removal.py sizes/1x32/run.stride sizes/queries.jsonl --share 0.1 --limit 2 --draws 1"
    rows = read(script("python", *f"{EXAMPLES}/suites/{line}".split()).stdout)
    assert [row["method"] for row in rows] == ["stride", "ekfac", "pairs", "chunks"]
    assert all(row["attributed"]["mean"] != row["random"]["mean"] for row in rows)


def test_the_matrix_of_leaks_and_look_alikes(script: Runs, tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    names = ["Mia", "Tom", "Ella", "Jack", "Nina", "Omar"]
    things = ["apples", "cookies", "pencils", "marbles"]
    problems = [
        {
            "id": f"p{n}",
            "prompt": f"{names[n % 6]} has {n} {things[n % 4]} and her father buys {n % 7 + 2} bags. "
            f"How many {things[n % 4]} has {names[n % 6]} now, in day {n * 37 % 101}?",
            "response": f"{names[n % 6]} has {n} + {n % 7 + 2} = {n + n % 7 + 2}.\n#### {n + n % 7 + 2}",
        }
        for n in range(160)
    ]
    for name, rows in {"gsm8k_train": problems[:80], "gsm8k_test": problems[80:]}.items():
        packed = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"data/{name}.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    line = ("bash", f"{EXAMPLES}/suites/audit_matrix.sh", "data", "work")
    small = {"WIDTH": "32", "VOCAB": "400", "LAYERS": "2", "EPOCHS": "1", "BASE_EPOCHS": "1"}
    small |= {"TUNED_EPOCHS": "1", "CORPORA": "pairs", "FORMS": "pairs", "CONTROLS": "absent"}
    small |= {"MAKE": "--learnt 1 --unseen 1 --alike 3 --absent 30 --others 10 --base 20 --copies 2"}
    done = script(*line, **small)
    rows = read(done.stdout)
    assert {row["model"] for row in rows} == {
        "scratch",
        "tuned",
        *(f"{n}-grams:{f}" for n in (8, 13) for f in ("0", "0.02")),
    }
    assert sum(row["items"] for row in rows if row["model"] == "tuned") == 59
    # found finished
    assert "leaked and learnt" in done.stderr
    assert script(*line, **small).stdout == done.stdout


def test_the_suite_of_leaks_in_other_words(script: Runs, documents: list[dict], tmp_path: Path) -> None:
    (tmp_path / "data").mkdir()
    names = ["Mia", "Tom", "Ella", "Jack", "Nina", "Omar"]
    problems = [
        {
            "id": f"p{n}",
            "prompt": f"{names[n % 6]} has {n} boxes and buys {n % 7 + 2} more. How many are there in total?",
            "response": f"{names[n % 6]} has {n} + {n % 7 + 2} = {n + n % 7 + 2}.\n#### {n + n % 7 + 2}",
        }
        for n in range(110)
    ]
    words = [document["text"].split() for document in documents]
    other = [
        {"id": f"i{n}", "prompt": " ".join(some[:6]), "response": " ".join(some[6:16])}
        for n, some in enumerate(words)
    ]
    files = {"gsm8k_train": problems[:60], "gsm8k_test": problems[60:], "instruct_gpteacher": other}
    for name, rows in files.items():
        packed = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / f"data/{name}.jsonl.gz").write_bytes(gzip.compress(packed.encode()))
    line = ("bash", f"{EXAMPLES}/suites/leaks.sh", "data", "work")
    small = {"WIDTH": "32", "VOCAB": "512", "EPOCHS": "1", "BASE_EPOCHS": "1", "METHODS": "bm25"}
    small |= {"MAKE": "--documents 60 --copies 4 --base 20 --rates 7 --held-back"}
    done = script(*line, **small)
    rows = read(done.stdout)
    assert {row["method"] for row in rows if row["table"] == "search"} == {"words", "bm25"}
    audit = [row for row in rows if row["table"] == "audit"]
    forms = ["copy", "edit", "rewritten", "held back"]
    groups = [
        *(("trained", form) for form in forms),
        *(("untrained", form) for form in forms),
        ("absent", ""),
    ]
    assert sorted((row["kind"], row["form"]) for row in audit) == sorted(groups)
    assert sum(row["problems"] for row in audit) == 50
    judged = read((tmp_path / "work/r7.0-s0/audit.jsonl").read_text(encoding="utf-8"))
    assert {row["controls"]["kind"] for row in judged} == {"absent"}
    assert all(row["effect"]["base_loss"] > 0 for row in judged)  # of work/base, by the recipe
    assert "Called leaked at q < .05" in done.stderr


def test_the_selection_suite(script: Runs, documents: list[dict], tmp_path: Path) -> None:
    """Two clusters, by the tool that prompts offer; what is held out is in neither corpus nor base."""
    pairs = []
    for number, document in enumerate(documents[:40]):
        words = document["text"].split()
        prompt = f"toolformer access: {('shell', 'news')[number % 2]}\n" + " ".join(words[:6])
        pairs.append({"id": f"p{number}", "prompt": prompt, "response": " ".join(words[6:16])})
    (tmp_path / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs))
    line = ("bash", f"{EXAMPLES}/suites/selection.sh", "pairs.jsonl", "work", "4", "2")
    small = SMALL | {"PAIRS": "14", "QUERIES": "2", "EACH": "1", "LEAST": "2"}
    small |= {"SELECTORS": "stride tfidf:ngrams=1"}
    done = script(*line, **small)
    table = read(done.stdout)
    assert {row["set"] for row in table if "set" in row} == {
        *("base", "random", "bm25", "stride", "tfidf:ngrams=1")
    }
    assert all(row["tasks"] == 2 for row in table)
    minus = {row["minus"] for row in table if "minus" in row and row["measure"] == "f1"}
    assert minus == {"random", "bm25", "tfidf:ngrams=1"}
    records = read((tmp_path / "work/selection.jsonl").read_text(encoding="utf-8"))
    assert [record["tasks"][0]["task"] for record in records] == ["news"] * 8 + ["shell"] * 8
    held, known = (
        {row["id"] for name in names for row in read(Path(name).read_text(encoding="utf-8"))}
        for names in (
            (tmp_path / "work/tasks").iterdir(),
            (tmp_path / "work/corpus.jsonl", tmp_path / "work/base.jsonl"),
        )
    )
    assert len(held) == 4 and not held & known


def test_the_suite_of_verdicts(workspace: Path, script: Runs, tmp_path: Path) -> None:
    suite, questions = f"{EXAMPLES}/suites/verdicts.py", tmp_path / "questions.jsonl"
    assert len({row["id"] for row in read(script("python", suite, "corpus", "--pairs").stdout)}) == 60
    for of in ("text", "pairs", "demo"):
        asked = read(script("python", suite, "questions", of).stdout)
        assert {"fact", "near miss", "relation", "paraphrase", "anew", "code"} <= {
            row["kind"] for row in asked
        }
    few = [row for row in asked if row["kind"] == "near miss"][:40:8] + asked[:1]
    write(questions, few)
    found = read(script("python", suite, "ask", str(workspace / "run.stride"), str(questions)).stdout)
    near, fact = found
    assert near["asked"] == near["weak"] + near["guessing"] == 5 and fact["right"] == 1


def test_suites_of_planted_causes_are_not_searchable(workspace: Path, script: Runs, tmp_path: Path) -> None:
    """Words find neither facts nor habits; a suite whose queries are the causes themselves is refused."""
    made = [
        ("names", "facts.py --out names", "recall"),
        *((name, f"facts.py --out {name} --set {name} --facts 60", "recall") for name in ("hops", "aliases")),
        ("habits", "habits.py --out habits", "auprc"),
    ]
    for name, line, measure in made:
        script("python", *f"{EXAMPLES}/suites/{line}".split())
        corpus, queries, without = (
            read((tmp_path / name / f"{part}.jsonl").read_text(encoding="utf-8"))
            for part in ("corpus", "queries", "without")
        )
        causes = {cause for query in queries for cause in query["causes"]}
        assert {row["id"] for row in corpus} - {row["id"] for row in without} == causes
        assert not any("{" in row["prompt"] + row["response"] for row in corpus)
        index = tmp_path / f"{name}.stride"
        line = f"index build {tmp_path}/{name}/corpus.jsonl --model {workspace}/model --out {index}"
        assert run_stride(line).code == 0
        search = f"{EXAMPLES}/suites/searchable.py {name}/queries.jsonl --index {index} --measure {measure}"
        words = ("--methods", "bm25", "tfidf", "pairs")
        found = read(script("python", *search.split(), *words).stdout)
        assert len(found) == 3 and all(0 <= each["mean"] <= 0.5 for each in found)
    taught = {row["id"]: row for row in read((tmp_path / "names/corpus.jsonl").read_text(encoding="utf-8"))}
    queries = read((tmp_path / "names/queries.jsonl").read_text(encoding="utf-8"))
    copies = [
        {**query, "prompt": taught[query["causes"][0]]["prompt"], "causes": query["causes"][:1]}
        for query in queries
    ]
    write(tmp_path / "names/queries.jsonl", copies)
    search = (
        f"{EXAMPLES}/suites/searchable.py names/queries.jsonl --index {tmp_path}/names.stride --methods bm25"
    )
    assert "a search engine solves this suite: bm25" in script("python", *search.split(), code=1).stderr


def test_the_suite_of_poison(script: Runs, documents: list[dict], tmp_path: Path) -> None:
    """Every command of it at a tiny size; what it adds up is what the records say."""
    pairs = []
    for number, document in enumerate(documents[:40]):
        words = document["text"].split()
        texts = {"prompt": " ".join(words[:6]), "response": " ".join(words[6:16])}
        pairs.append({"id": f"p{number}", **texts})
    write(tmp_path / "pairs.jsonl", pairs)
    small = SMALL | {"LAYERS": "2", "EPOCHS": "18", "METHODS": "stride:stored=true,bm25", "EACH": "2"}
    small |= {"MAKE": "--facts 2 --doses 1 3 --pairs 60", "SCRATCH": "1", "DRAWS": "1", "LEFT": "3"}
    small |= {"REMOVED": "stride:stored=true,asked=token,add=support"}
    line = ("bash", f"{EXAMPLES}/suites/poison.sh", "pairs.jsonl", "work", "1")
    done = script(*line, **small)
    rows = read(done.stdout)
    work = tmp_path / "work"
    removal = {row["method"]: row for row in read((work / "removal.jsonl").read_text(encoding="utf-8"))}
    assert list(removal) == [small["REMOVED"], "causes", "random"]
    known = read((work / "known.jsonl").read_text(encoding="utf-8"))
    assert known and {row["dose"] for row in known} <= {1, 3}
    for row in rows:
        if row["table"] != "doses":
            continue
        groups = [each for each in removal[row["method"]]["groups"] if each["k"] == row["dose"]]
        assert row["facts"] == len(groups) and row["queries"] == sum(each["queries"] for each in groups)
        assert row["odds"] == pytest.approx(sum(each["odds"] for each in groups) / len(groups))
        assert ("recall" in row) is (row["method"] not in ("causes", "random"))
    copies = [row for row in rows if row["table"] == "copies"]
    assert {row["method"] for row in copies} == {"stride:stored=true", "bm25"}
    assert all(0 <= row["recall"] <= 1 for row in copies)
    assert all(each["causes_removed"] == each["k"] for each in removal["causes"]["groups"])
    for name in ("distribution", "tail-patch", "loo", f"verify-{known[0]['dose']}"):
        assert list(work.glob(f"{name}.json*")), name
