"""Tables of what models lose that are trained again without the documents that a method names."""

from __future__ import annotations

from tests.benchmarks.figures import figure, markdown, pick

HABITS = "suites/removal_habits_seeds"
POISON = "suites/removal_poison"
REMOVED: tuple[tuple[str, str], ...] = (
    ("the planted causes", "causes"),
    ("stride, where they part, what supports", "stride:stored=true,asked=token,add=support"),
    ("stride, log-odds, what supports", "stride:stored=true,asked=odds,add=support"),
    ("stride, log-odds, all", "stride:stored=true,asked=odds"),
    ("stride, whole response, what supports", "stride:stored=true,add=support"),
    ("stride, whole response, all", "stride:stored=true"),
    ("EK-FAC, where they part, what supports", "ekfac:asked=token,add=support"),
    ("EK-FAC, log-odds, what supports", "ekfac:asked=odds,add=support"),
    ("EK-FAC, whole response, all", "ekfac"),
    ("TrackStar, where they part, what supports", "trackstar:asked=token,add=support"),
    ("TrackStar, whole response, all", "trackstar"),
    ("FeatSim, where they part, what supports", "featsim:asked=token,add=support"),
    ("FeatSim, whole response, all", "featsim"),
    ("RDS, where they part, what supports", "rds:asked=token,add=support"),
    ("RDS, whole response, all", "rds"),
    ("GradDot, whole response, all", "graddot"), ("LoGRA, rank 16, whole response, all", "logra:rank=16"),
    ("MiniLM embeddings", "embeddings"), ("shared pairs of tokens (`pairs`)", "pairs"), ("BM25", "bm25"),
    ("as many at random", "random"),
)  # fmt: skip
FOUND: tuple[tuple[str, str], ...] = (
    ("stride", "stride:stored=true"), ("MiniLM embeddings", "embeddings"), ("FeatSim", "featsim"),
    ("shared pairs of tokens (`pairs`)", "pairs"), ("BM25", "bm25"), ("TF-IDF", "tfidf"),
    ("chance", "chance"),
)  # fmt: skip


def habits() -> str:
    """Fall of the log-odds, rise of the loss and what is still shown: mean ± standard error over habits."""
    lines = [["removed", "fall of log-odds", "rise of loss", "still shown"]]
    for label, method in REMOVED:
        for record in pick(HABITS, schema="stride.group_removal/1", method=method):
            cells = [
                f"{figure(found['mean'], 2)} ± {figure(found['se'], 2)}"
                for found in (record["odds"], record["loss"])
            ]
            lines.append([label, *cells, figure(record["shown"]["mean"], 2)])
    return markdown(lines)


def poison() -> str:
    """Of every dose: what the model says, the share of copies found, and what is left without what is named.

    The last of the doses whose facts models were trained again for; of the others there are no cells.
    """
    said = pick(POISON, table="said", model="fine-tuned, 1.3 M")
    doses = [each["dose"] for each in said]
    lines = [["", *(f"said {dose} ×" for dose in doses)]]
    for label, field in (
        ("answered wrongly", "with"), ("without the copies", "without"), ("queries that count", "known")
    ):  # fmt: skip
        lines.append([label, *(f"{each[field]} of {each['queries']}" for each in said)])

    def row(label: str, table: str, method: str, field: str) -> list[list[str]]:
        found = {each["dose"]: each for each in pick(POISON, table=table, method=method)}
        if not any(field in each for each in found.values()):
            return []
        cells = [figure(found[dose][field], 2) if dose in found else "" for dose in doses]
        return [[label, *cells]]

    for label, method in FOUND:
        lines += row(f"copies found: {label}", "copies", method, "recall")
    for field, what in (("odds", "fall of log-odds"), ("shown", "still wrong")):
        for label, method in REMOVED:
            lines += row(f"{what}: {label}", "doses", method, field)
    return markdown(lines)
