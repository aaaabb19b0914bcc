"""Hold README and docs to the records: tables are made from them, figures in prose compared with them.

    python -m tests.benchmarks figures            says what differs; exit code 1 where something does
    python -m tests.benchmarks figures --write    makes the tables anew

A table stands between ``<!-- table: NAME -->`` and ``<!-- end -->``. A figure in prose is followed by a
comment that names its record: the file, what picks one line of it, and a field for each of the last numbers
before it (in a row of a table with => in place of |)::

    .655 ± .022 (.597)<!-- = suites/wikitext_adamw method=stride:stored=1 | mean se other -->

Of a comparison, loss at α = 0.5 is meant unless it says otherwise, and `mean`, `se`, `same`, `other`, `net`
are its LDS, the standard error, that of a group of queries, and what is left net of another method. A field
may be scaled (`share*100`, `peak_bytes/1e6`), turned round (`1/slope`) or taken over all that match
(`sum(…)`, `min(…)`, `max(…)`, `mean(…)`, `mean(…,WEIGHT)`, `count()`). A figure agrees where the record's
value, rounded as it is shown, is it.
"""

from __future__ import annotations

import argparse
import importlib
import json
import operator
import re
import shlex
import statistics
from collections.abc import Callable, Iterator, Sequence
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

from stride_cli.output import note

ROOT = Path(__file__).parents[2]
RESULTS = Path(__file__).parent / "results"
TABLE = re.compile(r"(<!-- table: (\S+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)
CLAIM = re.compile(r"<!-- = (.*?) (?:\||=>) ([^|]*?) -->", re.DOTALL)
NUMBER = re.compile(r"(?<![\w.])[-−+]?(?:\d[\d,]*(?:\.\d+)?|\.\d+)")
MEASURED = re.compile(r"(?<![\w.])[-−+]?\.\d{2,}")
"""How a measured figure is written: each must have a record. (A setting is 0.1, with a zero.)"""
Record = dict[str, Any]
_SHORT = {"mean": "spearman.mean", "se": "spearman.se", "net": "partial.mean"}
_OVER: dict[str, Callable[[list[float]], float]] = {
    "sum": sum, "min": min, "max": max, "mean": statistics.fmean, "count": len,
}  # fmt: skip


class Disagreement(ValueError):
    """A figure that its record does not have, or a comment that picks no record."""


def pages() -> list[Path]:
    """README and the pages of docs/ that are written by hand, the log included."""
    return [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]


@cache
def records(name: str) -> list[Record]:
    """The lines of results/NAME.jsonl."""
    lines = (RESULTS / f"{name}.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines if line]


def pick(name: str, **wanted: str) -> list[Record]:
    """The lines that have these fields; of comparisons loss and α = 0.5 unless they say otherwise."""
    found = []
    for record in records(name):
        usual = {"response": "loss", "alpha": "0.5"} if _compares(record) else {}
        if all(_shown(_at(record, key)) == value for key, value in {**usual, **wanted}.items()):
            found.append(record)
    return found


def value(found: Sequence[Record], field: str) -> float:
    """A field of the one record that was picked, or of all of them together.

    Raises
    ------
    Disagreement    none was picked, or several where one was meant, or the field is no number
    """
    over = re.fullmatch(r"(sum|min|max|mean|count)\((.*?)\)(.*)", field)
    inner, scale = (over[2], over[3]) if over else _unscaled(field)
    if over and over[1] == "count":
        return len(found)
    weight = ""
    if over and over[1] == "mean":
        inner, _, weight = inner.partition(",")
    elif over and over[1] == "sum":  # a count that a record does not have is none
        found = [record for record in found if _at(record, inner) is not None]
    numbers = [_number(record, inner.removeprefix("1/")) for record in found]
    if over is None and len(numbers) != 1:
        raise Disagreement(f"{len(numbers)} records are picked where one is meant")
    if weight:
        weights = [_number(record, weight) for record in found]
        result = sum(map(operator.mul, numbers, weights)) / sum(weights)
    else:
        result = _OVER[over[1]](numbers) if over else numbers[0]
    if inner.startswith("1/"):
        result = 1 / result
    if scale:
        factor = float(scale[1:])
        result = result * factor if scale[0] == "*" else result / factor
    return result


def claims(text: str) -> Iterator[tuple[int, list[re.Match[str]], tuple[str, str]]]:
    """Of every comment that names a record: its line, the numbers that it is about, and what it says."""
    start = 0
    for claim in CLAIM.finditer(text):
        before = text[start : claim.start()]
        paragraph = max(before.rfind("\n\n") + 2, 0) if "\n\n" in before else 0
        fields = shlex.split(claim[2])
        first = start + paragraph
        numbers = list(NUMBER.finditer(text, first, claim.start()))[-len(fields) :]
        yield text.count("\n", 0, claim.start()) + 1, numbers, (claim[1], claim[2])
        start = claim.end()


def disagreements(text: str, *, all_named: bool = True) -> list[str]:
    """What of a page's figures is not as in the records: one line each, with the line of the page.

    Without ``all_named`` a figure may have no comment: the log may name a record in a sentence.
    """
    told, covered = [], set()
    for line, numbers, (where, fields) in claims(text):
        name, *wanted = shlex.split(where)
        names = shlex.split(fields)
        covered |= {number.start() for number in numbers}
        try:
            found = pick(name, **dict(each.split("=", 1) for each in wanted))
            if len(numbers) != len(names):
                raise Disagreement(f"{len(numbers)} numbers before it, {len(names)} fields")
            for number, field in zip(numbers, names, strict=True):
                if not rounds_to(actual := value(found, field), number[0]):
                    raise Disagreement(f"shown {number[0]}, recorded {actual:.6g} ({field})")
        except (Disagreement, OSError, ValueError) as error:
            told.append(f"line {line}: {' '.join(f'{where} | {fields}'.split())}: {error}")
    for number in MEASURED.finditer(_without_code_and_tables(text)) if all_named else ():
        if number.start() not in covered:
            told.append(f"line {text.count(chr(10), 0, number.start()) + 1}: {number[0]} names no record")
    return told


def rounds_to(actual: float, shown: str) -> bool:
    """Whether a value, rounded to as many places, is what is shown.

    >>> rounds_to(0.5866, ".587"), rounds_to(0.5866, ".586")
    (True, False)
    """
    plain = shown.replace(",", "").replace("−", "-")
    places = len(plain.partition(".")[2])
    return abs(float(plain) - actual) <= 0.5 * 10.0**-places * (1 + 1e-9)


def _without_code_and_tables(text: str) -> str:
    """The text with what is no prose blanked, every character at its place."""
    for pattern in (TABLE.pattern, r"^```.*?^```", r"`[^`\n]*`", r"<!--.*?-->", r"\]\([^)\n]*\)"):
        text = re.sub(
            pattern, lambda match: re.sub(r"[^\n]", " ", match[0]), text, flags=re.DOTALL | re.MULTILINE
        )
    return text


def _compares(record: Record) -> bool:
    return record.get("schema") == "stride.comparison/1"


def _at(record: Record, field: str) -> Any:
    if _compares(record):
        if field in ("same", "other"):
            return next((each["mean"] for each in record["groups"] if each["group"] == field), None)
        field = _SHORT.get(field, field)
    found: Any = record
    for part in field.split("."):
        if isinstance(found, list):
            found = found[int(part)]
        elif isinstance(found, dict):
            found = found.get(part)
        else:
            return None
    return found


def _number(record: Record, field: str) -> float:
    found = _at(record, field)
    if not isinstance(found, int | float) or isinstance(found, bool):
        raise Disagreement(f"{field} is {found!r} in the record")
    return float(found)


def _unscaled(field: str) -> tuple[str, str]:
    scaled = re.fullmatch(r"(.+?)([*/][\d.e]+)", field)
    return (scaled[1], scaled[2]) if scaled else (field, "")


def _shown(found: Any) -> str:
    return str(found).lower() if isinstance(found, bool) else str(found)


def figure(number: float, places: int = 3) -> str:
    """As figures are written here: .587, −.008, 1.03."""
    text = f"{number:.{places}f}"
    if text.lstrip("-").startswith("0."):
        text = text.replace("0.", ".", 1)
    return text.replace("-", "−")


Column = tuple[str, str]
"""Heading and suite."""
BRIEF: tuple[Column, ...] = (  # on whose queries nothing was chosen
    ("WikiText, trained from scratch", "suites/wikitext_new_halves"),
    ("instructions, fine-tuned", "suites/instructions_defaults"),
    ("SmolLM2-135M, fine-tuned", "suites/instructions_135m_mixed_defaults"),
)
# whose rows stand for what was not run again
EARLIER = {"suites/instructions_135m_mixed_defaults": "suites/instructions_135m_mixed"}


def _shrunk(spec: str) -> tuple[str, str]:
    """A method whose influences are shrunk where STRIDE's are, which is in pre-training, and as it is."""
    return f"{spec}{',' if ':' in spec else ':'}shrink=true", spec


FIVE: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("STRIDE", ("stride:stored=true",)), ("shared token pairs", _shrunk("pairs")),
    ("EK-FAC, all layers", _shrunk("ekfac:layers=all")),
    ("LoGRA", ("logra:rank=16", *_shrunk("logra:rank=64"))),
    ("TF-IDF", (*_shrunk("tfidf:units=tokens"), "tfidf")),
)  # fmt: skip
RESULTS_ROWS: tuple[tuple[str, tuple[str, ...]], ...] = (
    FIVE[0], ("exact gradients of every chunk (`direct`)", ("direct",)), *FIVE[1:4],
    ("TrackStar, rank 32", _shrunk("trackstar:rank=32")), ("GradDot", _shrunk("graddot")),
    FIVE[4], ("BM25", _shrunk("bm25")), ("MiniLM embeddings", _shrunk("embeddings")),
    ("FeatSim", _shrunk("featsim")), ("RDS", _shrunk("rds")), ("chance", ("chance",)),
    ("the published recipe (SGD), on other halves", (PUBLISHED := "stride:recipe=paper",)),
)  # fmt: skip
OTHER_HALVES = {
    "suites/wikitext_new_halves": "suites/wikitext_earlier",
    "suites/instructions_defaults": "suites/instructions",
}


def methods_table(rows: Sequence[tuple[str, tuple[str, ...]]], columns: Sequence[Column]) -> str:
    """LDS ± standard error of each method on each suite; in bold the best of a column, and those whose own
    error reaches it."""
    body = [[cell(names, suite) for _, suite in columns] for _, names in rows]
    best = [max((each[0] for each in column if each), default=0.0) for column in zip(*body, strict=True)]
    lines = [[""] + [heading for heading, _ in columns]]
    for (label, _), row in zip(rows, body, strict=True):
        if any(row):
            cells = [
                "" if each is None else f"**{each[1]}**" if each[2] >= top else each[1]
                for each, top in zip(row, best, strict=True)
            ]
            lines.append([label, *cells])
    return markdown(lines)


def cell(names: Sequence[str], suite: str) -> tuple[float, str, float] | None:
    """The value, how it is shown, and how far its error reaches."""
    for source, name in product((suite, EARLIER.get(suite, suite)), names):
        rows = pick(OTHER_HALVES.get(source, source) if name == PUBLISHED else source, method=name)
        # where it was asked in two formats, in that of the other methods
        for found in [each for each in rows if each.get("dtype", "fp32") == "fp32"]:
            mean, error = found["spearman"]["mean"], found["spearman"]["se"]
            return mean, f"{figure(mean)} ± {figure(error)}", mean + error
    return None


SELECTED = {
    "stride@base": "stride, influences on the base model",
    "stride": "stride, influences on the fine-tuned model",
    "tfidf": "TF-IDF of words",
    "bm25": "BM25",
    "embeddings": "MiniLM embeddings",
    "less": "LESS",
    "logra:rank=64": "LoGRA, rank 64",
    "random": "as many at random",
    "base": "not fine-tuned",
}


def selection_table() -> str:
    """What a model is worth that was fine-tuned on what each method chose, and STRIDE's beside it."""
    mine = [each for each in records("suites/selection") if "measure" in each]
    first = next(iter(SELECTED))
    heads = ["F1", "first row less that", "loss, nats", "first row less that"]
    lines = [["documents chosen by", *heads]]
    for name, shown in SELECTED.items():
        cells = []
        for measure in ("f1", "loss"):
            own = [each for each in mine if each["measure"] == measure]
            (found,) = [each for each in own if each.get("set") == name and "minus" not in each]
            cells.append(figure(found["mean"], 3))
            away = [each for each in own if each.get("minus") == name and each["set"] == first]
            cells.append(f"{figure(away[0]['mean'], 3)} ± {figure(away[0]['se_tasks'], 3)}" if away else "")
        lines.append([shown, *cells])
    return markdown(lines)


def recovery_table() -> str:
    """Passes over the columns that a query costs: alone, among 64, and where real operators answered."""
    heads = (
        "λ",
        "one query, synthetic y",
        "each of 64 at once",
        "one query, real operators' y over 10⁶ chunks",
    )
    lines: list[list[str]] = [list(heads)]
    for ratio in ("0.8", "0.1", "0.01"):
        alone, batch, real = (
            value(pick("recovery", what=f"{what} at {ratio} λ_max"), field)
            for what, field in (
                ("solve", "cpu_bare_passes"), ("batch of 64", "cpu_bare_passes_each"),
                ("operators' y over 1000000 columns", "cpu_bare_passes_each"),
            )
        )  # fmt: skip
        lines.append([f"{ratio} λ_max", f"{alone:.1f}", f"{batch:.2f}", f"{real:.1f}"])
    return markdown(lines)


def scale_table() -> str:
    """Of each number of chunks: what building, opening, recovering and ranking take."""
    found = records("scale")
    rows: tuple[tuple[str, dict[str, Any], str, int], ...] = (
        ("bytes a chunk, beside tokens", {"part": "build"}, "bytes_a_chunk", 1),
        ("building: µs a chunk", {"part": "build"}, "microseconds_a_chunk", 1),
        ("building: MB above the start", {"part": "build"}, "peak_megabytes", 0),
        ("opening, the first time: s", {"part": "open", "what": "first"}, "processor_seconds", 1),
        ("opening again: s", {"part": "open", "what": "again"}, "processor_seconds", 1),
        ("opening: MB", {"part": "open", "what": "first"}, "peak_megabytes", 0),
        ("a bare pass: ns a chunk", {"part": "recover", "noise": 0.03}, "nanoseconds_a_chunk", 1),
        ("recovery: bare passes", {"part": "recover", "noise": 0.03}, "passes_recover", 1),
        ("ranking: bare passes", {"part": "recover", "noise": 0.03}, "passes_rank", 1),
        ("recovery and ranking: MB", {"part": "recover", "noise": 0.03}, "peak_megabytes", 0),
    )
    sizes = sorted({each["chunks"] for each in found if "chunks" in each})
    lines = [["chunks", *(f"{size:,}" for size in sizes)]]
    for label, wanted, field, places in rows:
        cells = []
        for size in sizes:
            own = [
                each for each in found if all(each.get(k) == v for k, v in {**wanted, "chunks": size}.items())
            ]
            cells.append(f"{own[0][field]:.{places}f}" if own else "")
        lines.append([label, *cells])
    return markdown(lines)


def solvers_table() -> str:
    """Processor time of other solvers in STRIDE's, at the same duality gap."""
    mine = [each for each in records("solvers") if "cpu_seconds_over_stride" in each]
    ratios = sorted({each["lambda_ratio"] for each in mine}, reverse=True)
    sizes = sorted({each["n"] for each in mine})
    powers = {n: f"10{str(len(str(n)) - 1).translate(str.maketrans('56', '⁵⁶'))}" for n in sizes}
    lines = [["", *(f"{powers[n]} chunks, {ratio:g} λ_max" for n in sizes for ratio in ratios)]]
    for solver in dict.fromkeys(each["solver"] for each in mine):
        cells = {(r["n"], r["lambda_ratio"]): r for r in mine if r["solver"] == solver}
        shown = [cells.get((n, ratio)) for n in sizes for ratio in ratios]
        lines.append([solver, *("" if r is None else f"{r['cpu_seconds_over_stride']:.3g}" for r in shown)])
    return markdown(lines)


def everything(suite: str) -> str:
    """Every comparison that a suite's file has, best first."""
    found = [each for each in records(f"suites/{suite}") if _compares(each)]
    found.sort(key=lambda each: (each["response"], -each["alpha"], -each["spearman"]["mean"]))
    lines = [["method", "by", "α", "LDS", "other documents", "net of", "bytes a chunk"]]
    for r in found:
        net, other = r.get("partial"), _at(r, "other")
        lines.append([
            f"`{r['method']}`".replace("|", "\\|"), r["response"], f"{r['alpha']:g}",
            f"{figure(r['spearman']['mean'])} ± {figure(r['spearman']['se'])}",
            "" if other is None else figure(other),
            f"{net['given']}: {figure(net['mean'])}" if net and net.get("mean") is not None else "",
            f"{r['bytes_per_chunk']:,.0f}" if r.get("bytes_per_chunk") else "",
        ])  # fmt: skip
    return markdown(lines)


CAUSES: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("stride", ("stride:stored=true",)),
    ("direct readout", ("direct",)),
    ("direct readout, `--normalize 0`", ("direct:normalize=0",)),
    ("direct readout, `--residuals final --normalize 0`", ("direct:residuals=final,normalize=0",)),
    ("EK-FAC of the MLPs", ("ekfac",)), ("EK-FAC of all layers", ("ekfac:layers=all",)),
    ("TrackStar", ("trackstar",)), ("LoGRA", ("logra",)), ("TRAK", ("trak",)), ("GradDot", ("graddot",)),
    ("RDS", ("rds",)), ("FeatSim", ("featsim",)),
    ("MiniLM embeddings", ("embeddings",)), ("shared pairs of tokens (`pairs`)", ("pairs",)),
    ("TF-IDF of pairs of words", ("tfidf",)), ("TF-IDF of words", ("tfidf:ngrams=1",)), ("BM25", ("bm25",)),
    ("chance", ("chance",)),
)  # fmt: skip


def causes_table() -> str:
    """Suites of known causes: each measure's mean ± standard error over queries; in bold the best."""
    columns = (
        ("facts: Recall@10", "suites/facts", "recall.2"), ("Recall@50", "suites/facts", "recall.3"),
        ("MRR", "suites/facts", "mrr"), ("habits: AUPRC", "suites/habits", "auprc"),
    )  # fmt: skip
    found = [
        [next((_at(each, field) for name in names for each in pick(suite, method=name)), None)
         for _, suite, field in columns]
        for _, names in CAUSES
    ]  # fmt: skip
    best = [max(each["mean"] for each in column if each) for column in zip(*found, strict=True)]
    lines = [[""] + [heading for heading, _, _ in columns]]
    for (label, _), row in zip(CAUSES, found, strict=True):
        shown = ["" if each is None else f"{figure(each['mean'])} ± {figure(each['se'])}" for each in row]
        top = [each is not None and each["mean"] == most for each, most in zip(row, best, strict=True)]
        lines.append(
            [label, *(f"**{text}**" if bold else text for text, bold in zip(shown, top, strict=True))]
        )
    return markdown(lines)


PARTS = (
    "projections, pairs", "pairs", "subsets", "exact gradients", "shared credit", "shrinkage",
)  # fmt: skip


def parts_table() -> str:
    """LDS of an answer on each suite, and the paired difference without each of its parts."""
    suites = {r["suite"]: r for r in pick("one_answer", what="ablation", without="nothing")}
    lines = [["", *(f"{suite} ({row['queries']} queries)" for suite, row in suites.items())]]

    def shown(found: Record) -> str:
        return f"{figure(found['mean'])} ± {figure(found['se'])}"

    lines.append(["whole", *(shown(row["lds"]) for row in suites.values())])
    lines.append(
        ["against the default before", *(shown(row["to_the_default_before"]) for row in suites.values())]
    )
    for part in PARTS:
        row = [f"without {part}"]
        for suite in suites:
            (found,) = (r for r in pick("one_answer", what="ablation", suite=suite) if r["without"] == part)
            row.append(shown(found["difference"]) if found["difference"]["se"] else "same")
        lines.append(row)
    return markdown(lines)


SIZES = (
    ("stride", "stride:stored=true"), ("EK-FAC of all layers", "ekfac:layers=all"),
    ("LoGRA, rank 64", "logra:rank=64"), ("LoGRA, rank 8", "logra:rank=8"),
    ("shared pairs of tokens (`pairs`)", "pairs"), ("TF-IDF of words", "tfidf"), ("BM25", "bm25"),
    ("FeatSim", "featsim"),
)  # fmt: skip


def sizes_table() -> str:
    """LDS ± standard error over models of several sizes, fine-tuned on the same pairs and halves of them."""
    own = {name: pick("suites/sizes", size=name) for name in ("4x128", "6x256", "8x448")}
    own["135 M"] = pick("suites/instructions_135m_today")
    counts = [record["parameters"] for record in pick("suites/sizes", what="size")]
    lines = [["", *(f"{count / 1e6:.1f} M" for count in counts), "135 M (SmolLM2)"]]
    for label, method in SIZES:
        found = [
            next((each["spearman"] for each in rows if each.get("method") == method), None)
            for rows in own.values()
        ]
        cells = [f"{figure(each['mean'])} ± {figure(each['se'])}" if each else "" for each in found]
        lines.append([label, *cells])
    return markdown(lines)


def markdown(lines: Sequence[Sequence[str]]) -> str:
    """A table, its first line the heading."""
    heading, *rows = lines
    shown = ["| " + " | ".join(heading) + " |", "|---" * len(heading) + "|"]
    return "\n".join(shown + ["| " + " | ".join(row) + " |" for row in rows]) + "\n"


def _module(name: str) -> Any:
    """Import a module of tables late: it is made of this module's parts."""
    return importlib.import_module(f"tests.benchmarks.{name}")


TABLES: dict[str, Callable[[], str]] = {
    "five": lambda: methods_table(FIVE, BRIEF),
    "results": lambda: methods_table(RESULTS_ROWS, BRIEF),
    "parts": parts_table,
    "selection": selection_table,
    "sizes": sizes_table,
    "causes": causes_table,
    "removal-habits-seeds": lambda: _module("removal_tables").habits(),
    "removal-poison": lambda: _module("removal_tables").poison(),
    "audit-matrix": lambda: _module("leak_tables").matrix(),
    "audit-null": lambda: _module("leak_tables").null(),
    "recovery": recovery_table,
    "scale": scale_table,
    "solvers": solvers_table,
}


def with_tables(text: str) -> str:
    """A page with its tables as the records have them."""
    return TABLE.sub(lambda match: match[1] + TABLES[match[2]]() + match[4], text)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks figures", description=__doc__)
    parser.add_argument("--write", action="store_true", help="make the tables anew")
    given = parser.parse_args(arguments)
    failed = False
    for page in pages():
        text = page.read_text(encoding="utf-8")
        made = with_tables(text)
        if made != text and given.write:
            page.write_text(made, encoding="utf-8")
            note(f"wrote {page.relative_to(ROOT)}")
        elif made != text:
            failed = True
            note(f"{page.relative_to(ROOT)}: a table is not as recorded; run it with --write")
        for line in disagreements(made, all_named=page.name != "log.md"):
            failed = True
            note(f"{page.relative_to(ROOT)}: {line}")
    return int(failed)
