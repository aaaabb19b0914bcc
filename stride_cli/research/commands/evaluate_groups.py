"""`stride evaluate removal --grouped`: retrain without what is named for many queries as one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from index_format.location import local_directory
from stride_cli.errors import UsageError
from stride_cli.research.commands.evaluate_options import Results

if TYPE_CHECKING:
    from collections.abc import Mapping

    from stride_cli.research.evaluation.bench import Bench
    from stride_cli.research.evaluation.options import BenchOptions, RemovalOptions

_LINE = '{"id": …, "group": …, "prompt": …, "response": …, "instead": …, "causes": [ids]}'


def removal_of_groups(
    bench: Bench, options: BenchOptions, removing: RemovalOptions, json: bool | None
) -> None:
    """Name documents with every method, retrain, show a record for every method and number of documents."""
    from stride_cli.commands.tables import number
    from stride_cli.models.kinds import refuse_classifier
    from stride_cli.output import progress
    from stride_cli.research.evaluation.bench import split_methods
    from stride_cli.research.evaluation.cause_queries import read_cause_queries
    from stride_cli.research.evaluation.group_removal import GroupBench, group_records
    from stride_cli.research.evaluation.query_groups import (
        GroupRule,
        all_of,
        build_asked,
        check_rules,
        find_groups,
    )
    from stride_cli.training.retraining import open_trainer, store_of, subset_seeds

    specs = split_methods(options.methods)
    if options.queries is None:
        raise UsageError("--grouped needs queries", fix=f"give --queries FILE, one object a line: {_LINE}")
    local_directory(bench.where.index)  # refused before a model is opened
    workspace = bench.workspace
    refuse_classifier(workspace.index, "groups are of prompts")
    asked = read_cause_queries(options.queries, workspace.index, known=False)
    groups = GroupBench(workspace, find_groups(asked), build_asked(workspace, asked, chat=options.chat))
    check_rules([GroupRule.of(spec) for spec in specs], groups.sets)
    sizes = groups.sizes(removing.top)
    with progress("naming documents", len(specs), unit="methods") as bar:
        named = groups.name(specs, int(max(own.max() for own in sizes)), advance=bar.advance)
    sets = all_of(groups.sets)
    before, effects = groups.measure(
        open_trainer(workspace, sets, recipe=removing.recipe, command=removing.command),
        named,
        sizes,
        subset_seeds(workspace.seed, removing.seeds).tolist(),
        removing,
        store=store_of(workspace.index),
    )
    results = Results(json)
    for together in effects:
        for record in group_records(groups, before, together, draws=removing.draws):
            k = "causes" if record["k"] is None else f"{record['k']:,}"
            cells = map(_cell, (record["odds"], record["odds_beyond_random"], record["loss"]))
            results.add(record, record["method"], k, *cells, number(record["shown"]["mean"], ".2f"))
    title = f"{len(groups.groups)} groups of {len(asked)} queries after removal, {removing.seeds} seeds"
    results.show(title, ["method", "k", "log-odds −", "beyond random", "loss +", "still shown"])


def _cell(found: Mapping[str, Any]) -> str:
    """Format ``+2.512 ± 0.310 (seeds 0.101)``; – where there is none."""
    if found["mean"] is None:
        return "–"
    errors = [f" ± {found['se']:.3f}" if found["se"] is not None else ""]
    errors += [f" (seeds {found['seed_se']:.3f})" if found["seed_se"] is not None else ""]
    return f"{found['mean']:+.3f}{''.join(errors)}"
