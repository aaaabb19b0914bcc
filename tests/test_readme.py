"""Every command block of README and docs, run as written from an empty directory; figures and tables there,
compared with the records."""

from __future__ import annotations

import json
import os
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import jsonschema
import numpy as np
import pytest

from stride_cli.api import demo_corpus
from stride_cli.commands.demo import suggested
from stride_cli.schema import json_schema
from tests.benchmarks import _drawings, figures
from tests.kept import kept
from tests.prepared import Prepared

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def blocks(page: str) -> list[str]:
    """The command blocks of a page of the repository."""
    return re.findall(r"```sh\n(.*?)```", (ROOT / page).read_text(encoding="utf-8"), re.DOTALL)


INSTALL, TESTS, WALK, LEAKED = blocks("README.md")
_, EXPLAINED, UNKNOWN, COMPARED, LOOKED_AT = blocks("docs/tutorial.md")
RECORDED, ADAPTED = blocks("docs/guides/trainer.md")
_, MODEL, SELECT = blocks("docs/guides/corpus.md")
CHECKPOINTS, STREAMED = blocks("docs/reference/models.md")
PROVE, HABIT, REPORT = blocks("docs/guides/prove.md")
(AUDITED,) = blocks("docs/guides/leaks.md")
EVALUATE, REMOVED, IMPORTED, BANK = blocks("docs/guides/compare.md")
CAUSES, DATE_LM, SCORES = blocks("docs/guides/causes.md")
(APART,) = blocks("docs/guides/machines.md")
RUN = {
    INSTALL, TESTS, WALK, MODEL, LEAKED, AUDITED, PROVE, HABIT, EXPLAINED, UNKNOWN, COMPARED,
    LOOKED_AT, STREAMED, ADAPTED, CHECKPOINTS, REPORT, SELECT, EVALUATE, REMOVED, IMPORTED,
    CAUSES, DATE_LM, SCORES, APART, RECORDED, BANK,
}  # fmt: skip


@pytest.fixture
def shell(tmp_path: Path, prepared: Prepared):
    """Runs a block in bash, in an empty directory unless in another, with this environment's `stride`; stdout
    comes back."""
    tools = prepared.tools()
    if shutil.which("jq") is None:  # the walk pipes through it; this reads one JSON value as `jq .` does
        (tools / "jq").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m json.tool --json-lines\n')
        (tools / "jq").chmod(0o755)
    work = tmp_path / "work"
    work.mkdir()

    def run(block: str, directory: Path = work) -> str:
        return prepared.script(["bash", "-euo", "pipefail", "-c", block], directory).stdout

    run.directory = work  # type: ignore[attr-defined]
    return run


@pytest.fixture
def demonstrated(shell, kept_home: Path) -> Path:
    """Where `stride demo` has been run as the README says: by .ci/run, just before, or once for this code."""
    if made := os.environ.get("STRIDE_TEST_DEMO"):
        return Path(made).parent

    def main_job(place: Path) -> None:
        assert len(shell(INSTALL.strip().split(" && ")[1], place).splitlines()) == 10

    return kept(kept_home, main_job)


@pytest.mark.slow
def test_the_main_job(shell, demonstrated: Path) -> None:
    """The demo finds the document that states the fact for at least 8 of its 10 prompts."""
    install, command = INSTALL.strip().split(" && ")
    assert install == "pip install ."  # .ci/run does that
    assert (demonstrated / "stride-demo/demo.stride/operators/manifest.json").is_file()
    answers = [json.loads(line) for line in shell(f"{command} 2>said", demonstrated).splitlines()]
    assert len(answers) == 10
    _suggestions(shell, demonstrated)
    for answer in answers:
        jsonschema.validate(answer, json_schema("stride.answer/1"))
    assert answers[0]["prompt"] == "The French Revolution began in" and "1789" in answers[0]["response"]
    found = [answer["hits"][0]["document"] in answer["expected"] for answer in answers]
    assert sum(found) >= 8
    # what README shows is what the first prompt gets
    (shown,) = re.findall(r"```text\n(.*?)```", README, re.DOTALL)
    assert answers[0]["prompt"] in shown and answers[0]["response"].split(",")[0] in shown
    assert f" {answers[0]['hits'][0]['document']}\n" in shown
    # the tutorial's questions
    (known,) = _values(shell(EXPLAINED, demonstrated))
    assert known["verdict"] == "clear" and known["hits"][0]["document"] == "history/french-revolution"
    (unknown,) = _values(shell(UNKNOWN, demonstrated))
    assert unknown["verdict"] == "guessing"
    (compared,) = _values(shell(COMPARED, demonstrated))
    assert compared["hits"][0]["document"] == "history/french-revolution"
    assert compared["comparison"]["probability"] > 0.5 > compared["comparison"]["other_probability"]
    assert [each["schema"] for each in _values(shell(LOOKED_AT, demonstrated))]
    tutorial = (ROOT / "docs/tutorial.md").read_text(encoding="utf-8")
    outputs = re.findall(r"```text\n(.*?)```", tutorial, re.DOTALL)
    for shown, answer in zip(outputs, (known, unknown, compared), strict=True):
        word = {"clear": "Clear:", "guessing": "Guessing:", None: "No verdict:"}[answer.get("verdict")]
        assert shown.startswith(answer["prompt"]) and word in shown
        assert answer["verdict"] == "guessing" or f" {answer['hits'][0]['document']}\n" in shown
    _verdicts(shell, answers, demonstrated / "stride-demo/demo.stride")


def _suggestions(shell, demonstrated: Path) -> None:
    """What the demo says to run next: the model knows the answer, the document that states it is on top."""
    said = (demonstrated / "said").read_text(encoding="utf-8").partition("next:\n")[2].splitlines()
    assert said == [f"  {command}" for command in suggested("stride-demo/demo.stride")]
    facts = {prompt["prompt"]: prompt for prompt in demo_corpus()[1]}
    asked = [command for command in said if command.startswith("  stride query")]
    assert len(asked) == 3
    for command in asked:
        fact = facts[shlex.split(command)[2]]
        (value,) = _values(shell(command, demonstrated))
        top = value if "jq" in command else value["hits"][0]
        assert top["document"] in fact["documents"]
        assert "jq" in command or (fact["answer"] in value["response"] and value["verdict"] == "clear")
        assert ("explanation" in value) == ("--verbose" in command)


def _verdicts(shell, answers: list[dict], index: Path) -> None:
    """Nine in ten of the demo's facts are clear, and one in twenty prompts that have nothing to do with its
    corpus (nonsense, code, everyday talk, other languages, things that do not exist); half of each are asked.
    """
    facts = [fact["prompt"] for fact in demo_corpus()[1]][::2]
    unrelated = (ROOT / "tests/unrelated_prompts.txt").read_text(encoding="utf-8").splitlines()[::2]
    (shell.directory / "asked.txt").write_text("\n".join([*facts, *unrelated]) + "\n", encoding="utf-8")
    found = [
        json.loads(line) for line in shell(f"stride query --file asked.txt --index {index}").splitlines()
    ]
    words = [answer["verdict"] for answer in found]
    assert (len(facts), len(unrelated), len(found)) == (25, 50, 75)
    assert words[:25].count("clear") >= 22 and words[25:].count("clear") <= 3, words
    # asked again, beside others: the last bits of a sum depend on that
    leading = {answer["prompt"]: (answer["response"], answer["hits"][0]) for answer in found}
    again = [(leading[each["prompt"]], each) for each in answers if each["prompt"] in leading]
    assert len(again) > 2
    for (response, hit), answer in again:
        assert (response, hit["document"]) == (answer["response"], answer["hits"][0]["document"])
        assert hit["influence"] == pytest.approx(answer["hits"][0]["influence"], rel=1e-3)


@pytest.mark.slow
def test_the_walk_on_a_corpus_of_ones_own(shell) -> None:
    lines = (ROOT / "stride_cli/demo/corpus.jsonl").read_text(encoding="utf-8").splitlines()
    history = [json.loads(line) for line in lines if '"id": "history/' in line]
    history.sort(key=lambda document: document["id"] != "history/french-revolution")
    chosen = [{**document, "text": document["text"][:80]} for document in history[:30]]
    rows = [json.dumps(document) + "\n" for document in chosen]
    (shell.directory / "corpus.jsonl").write_text("".join(rows), encoding="utf-8")
    output = shell(WALK)
    answer = next(
        value
        for value in _values(output)
        if isinstance(value, dict) and value.get("schema") == "stride.answer/1"
    )
    documents = [hit["document"] for hit in answer["hits"]]
    assert documents[0] == "history/french-revolution"  # others may all be below the mean document
    # a benchmark of which half is in the corpus, and a hit to be proved: fewer models than by default,
    # and each of a tenth of the steps
    items = [{"id": q["id"], "text": q["text"][:80]} for q in history[:4] + history[-4:]]
    (shell.directory / "benchmark.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items))
    fresh = [json.loads(line) for line in lines if '"id": "science/' in line][:24]  # not in this corpus
    rows = [json.dumps({"id": q["id"], "text": q["text"][:80]}) + "\n" for q in fresh]
    (shell.directory / "fresh.jsonl").write_text("".join(rows), encoding="utf-8")
    for block in (LEAKED, AUDITED):
        shell(block)
        assert "history/french-revolution" in (shell.directory / "audit.html").read_text(encoding="utf-8")
    recipe = json.loads((shell.directory / "model/stride_recipe.json").read_text(encoding="utf-8"))
    short = {**recipe, "epochs": recipe["epochs"] / 30, "steps": recipe["steps"] // 30}
    (shell.directory / "short.json").write_text(json.dumps(short), encoding="utf-8")
    (proved,) = _values(shell(PROVE.rstrip() + " --seeds 2 --random 1 --recipe short.json"))
    assert proved["schema"].startswith("stride.verify_hit/")
    assert proved["documents"][0]["document"] == "history/french-revolution"
    parted = [("The French Revolution began in", " 1789", " 1848"), ("It was", " the", " a")]
    rows = [dict(zip(("prompt", "response", "instead"), each, strict=True)) for each in parted]
    (shell.directory / "habit.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert HABIT.count("--top 40 ") == 1
    (habit,) = _values(
        shell(HABIT.replace("--top 40 ", "--top 3 --seeds 2 --random 1 --recipe short.json --json "))
    )
    assert habit["pooled"] == 2 and habit["compared"] and len(habit["documents"]) == 3
    (shell.directory / "task.jsonl").write_text("".join(json.dumps(item) + "\n" for item in items[:2]))
    shell(SELECT)
    chosen_for_task = (shell.directory / "selection/chosen.jsonl").read_text(encoding="utf-8")
    assert len(chosen_for_task.splitlines()) == 5
    (shell.directory / "prompts.jsonl").write_text(
        '{"id": "one", "prompt": "The French Revolution began in"}\n'
    )
    shell(REPORT)
    assert "french-revolution" in (shell.directory / "report.html").read_text(encoding="utf-8")
    (shell.directory / "my-model").symlink_to(shell.directory / "model")
    about, built = _values(shell(MODEL))
    assert about["parameters"] > 0 and built["documents"] == 30
    planned, fitted = _values(shell(STREAMED))
    assert planned["schema"] == "stride.train_estimate/1" and fitted["coverage"] == 1
    _adapt(shell.directory / "my-model", shell.directory / "lora")
    *_, fitted, answer = _values(shell(ADAPTED))
    assert fitted["space"] == "linear-matrix" and answer["hits"]
    first, *others = sorted((shell.directory / "model/checkpoints").glob("step-*"))
    assert len(others) == 2
    shutil.rmtree(first)  # two show as much as three
    (fitted,) = _values(shell(CHECKPOINTS))
    assert len(fitted["checkpoints"]) >= 2
    # the same index, evaluated: fewer subsets and steps than the block asks for, everything else as written
    lines = [json.dumps({"id": q["id"], "text": q["text"][-50:]}) for q in chosen[1:7]]
    (shell.directory / "queries.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    assert "--subsets 64 " in EVALUATE
    evaluated = EVALUATE.replace("--subsets 64 ", "--subsets 4 --recipe short.json ")
    records = [json.loads(line) for line in shell(evaluated).splitlines()]
    assert [r.get("method") for r in records] == [None, "stride", "tfidf", "ekfac", "trak"]
    assert all("error" not in record for record in records)
    assert (shell.directory / "comparison.html").stat().st_size > 5_000
    # what a method names for a group of prompts, taken out: fewer models, each of fewer steps
    asked = {"group": "france", "prompt": "The French Revolution began in", "response": " 1789"}
    asked |= {"instead": " 1848", "causes": ["history/french-revolution"]}
    (shell.directory / "habits.jsonl").write_text(json.dumps({"id": "one", **asked}) + "\n", encoding="utf-8")
    assert "--seeds 3 " in REMOVED
    removed = [
        json.loads(line)
        for line in shell(
            REMOVED.replace("--seeds 3 ", "--seeds 2 --draws 1 --recipe short.json ")
        ).splitlines()
    ]
    assert [each["method"].partition(":")[0] for each in removed] == ["stride", "bm25", "causes", "random"]
    assert all(each["documents"] == 30 and each["k"] == 1 for each in removed)
    # a truth of others: five subsets of 30 documents, losses of the same queries
    measured = []
    for start in range(5):
        documents = list(range(start, 30, 3))
        measured.append({"train_subset": documents, "train_subset_global": documents})
        measured[-1]["test_loss"] = [2 + 0.1 * (start + q) % 3 for q in range(len(lines))]
    (shell.directory / "lds.jsonl").write_text("".join(json.dumps(row) + "\n" for row in measured))
    (shell.directory / "test.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
    imported, *judged = [json.loads(line) for line in shell(IMPORTED).splitlines()]
    assert imported["imported"] == imported["subsets"] == 5
    assert [record["method"] for record in judged] == ["tfidf", "chance"]
    # a bank of bergson's
    made = "tests/stride_cli/research/commands/bergson_bank.tar.gz"
    shutil.unpack_archive(ROOT / made, shell.directory / "made", filter="data")
    shell("ln -s made/bank && cp made/held.jsonl queries.jsonl")
    shell("stride index build made/corpus.jsonl --model bank/retrained/base --form bare --out bank.stride")
    assert json.loads(shell(BANK).splitlines()[0])["imported"] == 12
    # who taught it, where that is known
    (built,) = [value for value in _values(shell(APART)) if value.get("documents") == 30]
    assert built["index"] == "whole.stride"
    known = {"id": "one", "prompt": "The French Revolution began in", "response": " 1789"}
    known["causes"] = ["history/french-revolution"]
    (shell.directory / "queries.jsonl").write_text(json.dumps(known) + "\n", encoding="utf-8")
    taught = [value for value in _values(shell(CAUSES)) if value["schema"] == "stride.causes/1"]
    assert [each["method"] for each in taught] == ["stride:stored=true", "direct", "bm25", "tfidf"]
    # a set of DATE-LM, and scores that came from elsewhere
    (shell.directory / "finetuned").symlink_to(shell.directory / "model")
    (shell.directory / "Counterfact").mkdir()
    for split, some in (("train", history[:30]), ("ref", history[:3])):
        rows = []
        for q in some:
            words = q["text"].split()
            entities = {"counterfactual_entity": q["id"], "true_entity": words[0]}
            texts = {"prompt": " ".join(words[:5]), "response": " ".join(words[5:12])}
            rows.append(json.dumps({**texts, **entities}))
        (shell.directory / f"Counterfact/{split}.jsonl").write_text("\n".join(rows) + "\n", encoding="utf-8")
    for block, methods in (
        (DATE_LM, ["stride:stored=true", "bm25"]),
        (SCORES, ["scores:scores/bm25.json", "tfidf"]),
    ):
        judged = [value for value in _values(shell(block)) if value["schema"] == "stride.causes/1"]
        assert [each["method"] for each in judged] == methods
        assert all("error" not in each and each["documents"] == 30 for each in judged)


def _adapt(base: Path, out: Path) -> None:
    """Save a small LoRA adapter of a model, as PEFT saves it."""
    import peft
    from transformers import AutoModelForCausalLM

    config = peft.LoraConfig(r=2, target_modules=["q_proj", "v_proj"], init_lora_weights=False)
    peft.get_peft_model(AutoModelForCausalLM.from_pretrained(base), config).save_pretrained(out)


@pytest.mark.slow
def test_a_recorded_run_is_indexed_and_its_tokens_shown(shell, monkeypatch: pytest.MonkeyPatch) -> None:
    from stride_cli.models.language.bpe import train_bpe
    from tests.tiny_models import tiny_nanochat

    monkeypatch.chdir(shell.directory)
    guide = (ROOT / "docs/guides/trainer.md").read_text(encoding="utf-8")
    names = [(a, b) for a in ("Mar", "Tis", "Pel") for b in ("nik", "sa", "vin", "tol", "rek", "dro")]
    pairs = {f"The guardian of {a + b} is": f" {(b + a).title()}." for a, b in names}
    tokenizer = train_bpe(map("".join, pairs.items()), vocab_size=999, context_length=64)
    tokenizer.chat_template, tokenizer.pad_token = None, None
    tokenizer.save_pretrained("base")
    tiny_nanochat(len(tokenizer)).save_pretrained("base")
    rows = [{"prompt": prompt, "completion": end} for prompt, end in pairs.items()]
    Path("pairs.jsonl").write_text("\n".join(map(json.dumps, rows)))
    exec(re.findall(r"```python\n(.*?)```", guide, re.DOTALL)[0], {})
    *_, shown = _values(shell(RECORDED))
    assert shown["document"] == "17" and shown["form"]["source"] == "run"
    assert f"```text\n{shell(RECORDED.splitlines()[-1] + ' --text')}```" in guide


def test_ci_runs_the_two_commands_word_for_word_and_in_order() -> None:
    lines = (ROOT / ".ci/run").read_text(encoding="utf-8").splitlines()
    first, second = (lines.index(f"{block.strip()} || exit") for block in (INSTALL, TESTS))
    slow = next(n for n, line in enumerate(lines) if '"python -m pytest -m slow ' in line)
    assert first < second < slow


def test_every_block_is_run() -> None:
    for page in figures.pages():
        for block in blocks(str(page.relative_to(ROOT))):
            assert block in RUN, f"{page}: no test runs\n{block}"


def test_readme_is_short() -> None:
    assert len(README.splitlines()) <= 100


@pytest.mark.parametrize("page", figures.pages(), ids=lambda page: str(page.relative_to(ROOT)))
def test_figures_and_tables_are_those_of_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert figures.with_tables(text) == text, "run `python -m tests.benchmarks figures --write`"
    assert figures.disagreements(text, all_named=page.name != "log.md") == []
    assert re.findall(r"^\|.*<!-- = [^>]*\|.*$", text, re.MULTILINE) == [], "in a table write =>"


def test_records_that_the_log_names_are_kept() -> None:
    log = (ROOT / "docs/log.md").read_text(encoding="utf-8")
    named = set(re.findall(r"([\w/]+)\.jsonl", log)) | set(re.findall(r"record:? `([\w/]+)", log))
    names = {name.removeprefix("tests/benchmarks/results/") for name in named}
    assert len(names) > 15
    results = ROOT / "tests/benchmarks/results"
    found = {name for name in names if any(results.rglob(f"{name.rpartition('/')[2]}.jsonl"))}
    assert names == found


def test_a_figure_that_is_not_as_recorded_is_seen() -> None:
    right = "stride .587 ± .023<!-- = suites/wikitext method=stride:stored=1 | mean se -->"
    assert figures.disagreements(right) == []
    for wrong, told in (
        (right.replace(".587", ".588"), "shown .588, recorded 0.586557 (mean)"),
        (right.partition("<!--")[0], ".023 names no record"),
    ):
        assert any(told in line for line in figures.disagreements(wrong)), (
            wrong,
            figures.disagreements(wrong),
        )
    assert figures.disagreements("Set it to 0.1, as `--lambda-ratio .25` and [this](.55.md) say.") == []
    table = "<!-- table: five -->\n| |\n<!-- end -->\n"
    assert ".534 ± .028" in figures.with_tables(table)


def test_recall_holds_whatever_is_kept_and_read() -> None:
    records = figures.records("recall")
    rows = [row for row in records if row["counted"] == (row["read"] < 100)]  # as it is stated
    assert len(rows) == 58 and all(row["held"] >= 0.95 for row in rows)


def _drawn(row: dict[str, Any]) -> bool:
    return row["what"] in ("own", "all") and "points" in row and row.get("form") != "chat"


def test_forecasts_in_nats_hold_on_queries_that_had_no_part_in_them() -> None:
    rows = [row for row in figures.records("nats") if row["what"] in ("own", "all")]
    rows = [row for row in rows if row.get("form") != "chat"]  # of which the model knows none
    assert {row["scale"].get("link", "linear") for row in rows} == {"linear", "ceiling"}
    for row in rows:
        assert 0.7 < row["slope"] < 1.4 and row["correlation"] > 0.8
        predicted, measured = np.array(row.get("points") or [[1.0, row["slope"]]]).T
        assert predicted @ measured / (predicted @ predicted) == pytest.approx(row["slope"], rel=2e-3)
        assert row["what"] == "own" or row["pairs"] >= 100


def test_plots_show_what_is_recorded() -> None:
    quality = _drawings.quality()
    nats = _drawings.nats(figures.records("nats"))
    assert nats.count("<circle") == sum(len(row["points"]) for row in figures.records("nats") if _drawn(row))
    for drawing in (quality, nats):
        ElementTree.fromstring(drawing)
    assert ">.858 ± .011<" in quality and ">.489 ± .028<" in quality


def test_the_site_has_what_its_pages_link_to() -> None:
    pytest.importorskip("mkdocs")
    hooks = runpy.run_path(str(ROOT / "docs/hooks.py"))
    turned = hooks["relinked"]
    assert turned("[a](../SECURITY.md#b)", "docs/scale.md", "scale.md") == "[a](security-policy.md#b)"
    assert turned("[a](answers.md)", "docs/concepts.md", "concepts.md") == "[a](answers.md)"
    assert turned("[a](SECURITY.md)", "CONTRIBUTING.md", "contributing.md") == "[a](security-policy.md)"
    copied = turned("[a](../../.pre-commit-hooks.yaml)", "docs/guides/leaks.md", "guides/leaks.md")
    assert copied == "[a](../files/pre-commit-hooks.yaml)"
    assert turned("[a](https://b)", "docs/a.md", "a.md") == "[a](https://b)"
    page = hooks["_command_page"](hooks["_root"]().commands["index"], "stride index")
    assert "## stride index verify" in page and "{ #index-build-subsets }" in page
    pages = {name: hooks[f"_{name}_page"]() for name in ("settings", "schema", "python")}
    assert "`STRIDE_QUERY_TOP`" in pages["settings"] and "## stride.answer/1" in pages["schema"]
    assert "- `where`: path or URL of the index" in pages["python"]
    assert all(
        name in hooks["_records"]() for name in ("suites/wikitext.jsonl", "## Suite instructions_135m")
    )


def test_the_papers_tables_name_commands_records_and_methods_that_are_there() -> None:
    from stride_cli.research.methods.registry import open_method

    hooks = runpy.run_path(str(ROOT / "docs/hooks.py"))
    page, entries = hooks["_paper_page"](), json.loads((ROOT / "docs/paper.json").read_text(encoding="utf-8"))
    assert page.count("| .496 ± .029 |") == 2 and "| .034 ± .024 |" in page and len(entries) == 10
    for entry in entries:
        for name in (*entry.get("suites", {}).values(), *entry.get("records", {}).values()):
            assert figures.records(name)
        for spec in (spec for specs in entry.get("methods", {}).values() for spec in specs):
            open_method(spec)
        for line in (*entry["fill"], *entry["at_size"]):
            program, *words = shlex.split(line)
            if program != "stride":
                assert (ROOT / program).is_file(), line
                continue
            command = hooks["_root"]()
            while hasattr(command, "commands"):
                command = command.commands[words.pop(0)]
            command.make_context("stride", words)


def test_links_of_pages_lead_to_files() -> None:
    for page in [*figures.pages(), ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md"]:
        for link in re.findall(r"\]\(([^)#\s]+)[^)]*\)", page.read_text(encoding="utf-8")):
            made = {"assets", "records.md", "schema.md"} & set(Path(link).parts)  # docs/hooks.py makes these
            assert link.startswith("https://") or made or (page.parent / link).exists(), f"{page}: {link}"


def _values(text: str) -> list:
    """All JSON values in a text, one after the other."""
    decoder, position, found = json.JSONDecoder(), 0, []
    while position < len(text):
        if text[position].isspace():
            position += 1
            continue
        value, position = decoder.raw_decode(text, position)
        found.append(value)
    return found
