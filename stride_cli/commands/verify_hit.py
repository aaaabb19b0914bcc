"""`stride verify-hit`: did the prediction depend on the documents that a query names?"""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from stride_cli.attribution.options import QueryOptions, QuestionOptions
from stride_cli.commands.options import Asked, Flags, Json, PromptFile, with_flags
from stride_cli.errors import StrideError, UsageError
from stride_cli.prove.options import HitOptions

if TYPE_CHECKING:
    from stride_cli.schema.verify_records import VerifyHitRecord

EXAMPLE = """\b
Examples:
  stride verify-hit "The French Revolution began in" --top 10
  stride verify-hit "The capital of France is" --response "Paris" --seeds 10 --random 3
  stride verify-hit "The capital of France is" --documents history/paris,geography/france
  stride verify-hit --file habit.jsonl --top 40
  stride verify-hit 17 --index classifier.stride --top 20 --json | jq .verdict
"""


@with_flags
def verify_hit(
    text: Annotated[
        str | None,
        typer.Argument(help="The prompt; - reads one a line from stdin. Of a classifier: a row."),
    ] = None,
    file: PromptFile = None,
    documents: Annotated[
        str | None,
        typer.Option("--documents", help="Ids, separated by commas: test these, not the query's hits."),
    ] = None,
    *,
    question: Annotated[QuestionOptions, Flags(QuestionOptions)],
    hits: Annotated[HitOptions, Flags(HitOptions, first=("seeds", "random", "effect"))],
    options: Annotated[
        QueryOptions,
        Flags(
            QueryOptions,
            only=("top", "lambda_ratio", "chat"),
            top={"help": "How many of the top documents. [10]"},
        ),
    ],
    where: Asked,
    json: Json = None,
) -> None:
    """Retrain without a query's top documents, and without as many random ones: did the prediction depend on
    them?

    Trains seeds × (2 + random) models by the recipe stored with the model (or by --command): with every
    document, without the top ones, and without random ones of like length. The difference is taken seed by
    seed; its interval is Student's t over seeds, each of which has random sets of its own. It lies above
    zero: the prediction depended on them. It lies below --effect and not above zero: no evidence that it did.
    Otherwise there were too few runs to tell: ask for more --seeds, those that are done are kept beside the
    index. Intervals widen with each look, so that all looks hold together with 95 %. An interrupted run goes
    on.

    Of responses that are compared with others (--instead), it is the fall of the log-odds that is looked at.
    """
    from stride_cli import api
    from stride_cli.commands.prompts import read_prompts
    from stride_cli.output import emit, note, wants_json

    texts = [] if text is None else [text]
    asked = read_prompts(texts, file)
    prompt: Any = text
    if question.instead is not None:
        if text in (None, "-"):
            said = "--instead is of one prompt (in a file, or of stdin, each has its own)"
            raise UsageError(said, fix='{"prompt", "response", "instead"} a line, or a prompt and --instead')
        prompt, question = [{"prompt": text, **asdict(question)}], QuestionOptions()
    elif file is not None or text == "-":
        prompt = [each.asked for each in asked]
        if error := next((each for each in prompt if isinstance(each, StrideError)), None):
            raise error
    named = None if documents is None else [name.strip() for name in documents.split(",") if name.strip()]
    found = api.verify_hit(
        where,
        prompt,
        replace(options, bottom=0),
        hits,
        response=question.response,
        span=question.span,
        documents=named,
    )
    if wants_json(json):
        emit(found)
        note(found["sentence"])
        return
    render_check(found)


def render_check(found: VerifyHitRecord) -> None:
    """Documents, a row for every seed, and the verdict."""
    from rich.text import Text

    from stride_cli.attribution.frames import influence_text
    from stride_cli.characters import printable
    from stride_cli.commands.tables import print_table
    from stride_cli.output import console as open_console

    console = open_console()
    if count := found.get("pooled"):
        console.print(Text(f"{count:,} prompts as one", style="bold"))
    else:
        said = Text.assemble(printable(found["prompt"]), (printable(found["response"]), "bold"))
        if instead := found.get("instead"):
            said.append(" rather than ").append(printable(instead.strip()), style="bold")
        console.print(said)
    rows = [
        [hit["document"], influence_text(hit, found.get("unit")), f"{hit['tokens']:,}"]
        for hit in found["documents"]
    ]
    print_table("Documents removed", ["document", "influence", "tokens"], rows)
    rows = []
    for seed in dict.fromkeys(run["seed"] for run in found["runs"]):
        runs = [run for run in found["runs"] if run["seed"] == seed]
        full, hits = (
            next(run for run in runs if run["removed"] == what)["loss"] for what in ("nothing", "hits")
        )
        chance = [run["loss"] for run in runs if run["removed"] == "random"]
        mean = sum(chance) / len(chance)
        spread = f"{min(chance):.3f} … {max(chance):.3f}"
        rows.append([str(seed), f"{full:.3f}", f"{hits:.3f}", f"{mean:.3f}", spread, f"{hits - mean:+.3f}"])
    columns = ["seed", "all", "without them", "without random ones", "from … to", "difference"]
    what = "Log-odds × -1, nats" if found.get("compared") else "Loss of the response, nats a token"
    print_table(f"{what}, retrained on", columns, rows)
    console.print(Text(printable(found["sentence"]), style="bold"))
