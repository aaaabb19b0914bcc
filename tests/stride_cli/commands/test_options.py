"""Options on the command line, in stride.yaml and in specs of methods: what cannot be is refused by name."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from stride_cli.attribution.options import CalibrationOptions, QueryOptions
from stride_cli.audit.options import AuditOptions, FindingsOptions
from stride_cli.commands.app import command_line
from stride_cli.commands.train import train_settings
from stride_cli.corpus.options import BuildOptions, PlanOptions
from stride_cli.corpus.readers import ReadOptions
from stride_cli.errors import UsageError
from stride_cli.operators.options import FLAT, ClosedOptions, FitChoice, FitRunOptions, SgdOptions
from stride_cli.options import Entry, entries
from stride_cli.prove.options import HitOptions
from stride_cli.research.evaluation.options import (
    CausesOptions,
    LdsOptions,
    LooOptions,
    RankingOptions,
    RemovalOptions,
    TailPatchOptions,
)
from stride_cli.research.methods.registry import open_method
from stride_cli.research.selection.options import JudgingOptions, SelectOptions
from stride_cli.research.training.options import TruthOptions
from stride_cli.research.tuning.options import TuneOptions
from stride_cli.training.options import ClassifierOptions, FinetuneOptions, RetrainOptions, TrainOptions

FINETUNE = "model finetune gone.jsonl --model gone --out new"
BUILD = "index build gone.jsonl --model gone --out new"
TRUTH = "evaluate truth --index gone.stride --queries gone.jsonl"
SELECTION = "evaluate selection gone --model gone --queries gone.jsonl"
COMMANDS: tuple[tuple[str, type], ...] = (
    ("train --index gone.stride", FitChoice),
    ("train --index gone.stride", ClosedOptions),
    ("train --index gone.stride --fit sgd", SgdOptions),
    ("query text --index gone.stride", QueryOptions),
    ("calibrate --index gone.stride", CalibrationOptions),
    ("verify-hit text --index gone.stride", HitOptions),
    ("audit gone.jsonl --index gone.stride", AuditOptions),
    ("tune --index gone.stride", TuneOptions),
    ("evaluate removal --index gone.stride", RetrainOptions),
    ("model train gone.jsonl --out new", TrainOptions),
    ("model train gone.npz --out new", ClassifierOptions),
    (FINETUNE, FinetuneOptions),
    (BUILD, ReadOptions),
    (BUILD, BuildOptions),
    ("index plan gone.jsonl --model gone", PlanOptions),
    ("train --index gone.stride", FitRunOptions),
    ("audit gone.jsonl --index gone.stride", FindingsOptions),
    ("select gone.jsonl --index gone.stride", SelectOptions),
    (TRUTH, TruthOptions),
    ("evaluate lds --index gone.stride", LdsOptions),
    ("evaluate compare --index gone.stride", LdsOptions),
    ("evaluate tail-patch --index gone.stride", TailPatchOptions),
    ("evaluate removal --index gone.stride", RemovalOptions),
    ("evaluate loo --index gone.stride", LooOptions),
    ("evaluate causes --index gone.stride --queries gone.jsonl", CausesOptions),
    (SELECTION, JudgingOptions),
    ("baseline tfidf --index gone.stride", RankingOptions),
)


@pytest.fixture(autouse=True)
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return tmp_path


def wrong_values(entry: Entry) -> Iterator[Any]:
    """One just outside each end of an option's range, or no choice."""
    about = entry.about
    if about.choices:
        yield "nonsense"
    if about.low is not None:
        yield about.low - 1
    if about.above is not None:
        yield about.above
    if about.high is not None:
        yield about.high + 1
    if float in entry.kinds and entry.expected:
        yield "nan"


def offered(line: str) -> set[str]:
    """The flags of the command that a line runs."""
    command = typer.main.get_command(command_line())
    for word in line.split():
        if not hasattr(command, "commands"):
            break
        command = command.commands[word]
    return {flag for parameter in command.params for flag in parameter.opts}


def on_the_command_line() -> Iterator[Any]:
    for line, cls in COMMANDS:
        flags = offered(line)
        for entry in entries(cls).values():
            if entry.about.help and entry.flag in flags and not entry.about.listed:
                for value in wrong_values(entry):
                    yield pytest.param(
                        line, entry, value, id=f"{line.split(' gone')[0]} {entry.flag} {value}"
                    )


@pytest.mark.parametrize(("line", "entry", "value"), list(on_the_command_line()))
def test_a_value_out_of_range_is_refused_before_anything_is_opened(
    run, elsewhere: Path, line: str, entry: Entry, value: Any
) -> None:
    result = run(f"{line} {entry.flag} {value}")
    assert result.code == 2 and result.out == ""
    assert f"error: {entry.flag} is " in result.err and "expected" in result.err and "fix: " in result.err
    assert "gone" not in result.err and not list(elsewhere.iterdir())


def in_settings() -> Iterator[Any]:
    for section, classes in (("train", FLAT), ("query", (QueryOptions,))):
        for entry in entries(*classes).values():
            if entry.about.setting:
                for value in wrong_values(entry):
                    yield pytest.param(section, entry, value, id=f"{section}.{entry.name} {value}")


@pytest.mark.parametrize(("section", "entry", "value"), list(in_settings()))
def test_a_value_out_of_range_is_refused_in_settings(
    run, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, section: str, entry: Entry, value: Any
) -> None:
    variable = f"STRIDE_{section}_{entry.name}".upper()
    monkeypatch.setenv(variable, str(value))
    refused = run("config show")
    assert refused.code == 2 and f"error: {variable} is " in refused.err
    assert f"(expected {entry.expected})" in refused.err and f"fix: unset {variable}" in refused.err
    monkeypatch.delenv(variable)
    (elsewhere / "stride.yaml").write_text(
        f"{section}:\n  {entry.name}: {'.nan' if value == 'nan' else value}\n"
    )
    line = "train --index gone.stride" if section == "train" else "query text --index gone.stride"
    refused = run(line)
    assert refused.code == 2 and f"error: stride.yaml: {section}.{entry.name} is " in refused.err
    assert f"(expected {entry.expected})" in refused.err
    remedy = refused.err.partition("fix: write ")[2].strip()
    (elsewhere / "stride.yaml").write_text(f"{section}:\n  {remedy}\n")
    assert "gone.stride" in run(line).err  # the remedy works


def test_a_setting_of_the_other_fit_waits_for_its_own(run, elsewhere: Path) -> None:
    """`stride tune` writes a damping; --fit sgd on the command line is not stopped by it."""
    (elsewhere / "stride.yaml").write_text("train:\n  damping: 0.3\n  rank: 8\n")
    assert train_settings({}) == ClosedOptions(damping=0.3, rank=8)
    assert train_settings({"fit": "sgd", "steps": 5}) == SgdOptions(rank=8, steps=5)
    assert train_settings({"recipe": "paper", "rank": 4}) == SgdOptions(rank=4, recipe="paper")
    (elsewhere / "stride.yaml").write_text("train:\n  damping: 0.3\n  fit: sgd\n")
    assert train_settings({"fit": "closed"}) == ClosedOptions(damping=0.3)
    refused = run("train --index gone.stride")
    message = "train.damping (stride.yaml) is an option of --fit closed, and this fit is sgd"
    assert refused.code == 2 and message in refused.err and "or use --fit closed" in refused.err
    (elsewhere / "stride.yaml").write_text("train:\n  fit: sgd\n")
    refused = run("train --index gone.stride --damping 0.3")
    assert refused.code == 2 and "--damping is an option of --fit closed" in refused.err


@pytest.mark.parametrize(
    ("spec", "message", "remedy"),
    [
        (
            "stride:fit=sgd,curvature=exact",
            "stride: curvature is an option of fit=closed, and this fit is sgd",
            "leave out stride: curvature, or use fit=closed",
        ),
        ("stride:rank=0", r"stride: rank is 0 \(expected 1 to 1,048,576\)", "write rank=1"),
        ("stride:measure=guess", "stride: measure is 'guess'", "write measure=auto"),
        ("stride:lambda_ratio=2", "stride: lambda_ratio is 2.0", "write lambda_ratio=0.1"),
        ("direct:damping=0", "direct: damping is 0.0", "write damping=0.1"),
        ("direct:steps=5", "direct has no option 'steps'", "options of direct: "),
        ("stride:seed=5", "stride has no option 'seed'", "fit, space, layer, rank"),
    ],
)
def test_specs_of_methods_have_the_same_options(spec: str, message: str, remedy: str) -> None:
    with pytest.raises(UsageError, match=message) as caught:
        open_method(spec)
    assert remedy in str(caught.value.fix)
