"""`stride calibrate`, and what answers say because of it."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest

from index_format.reader import Index
from stride_cli.schema.derivation import to_record


@pytest.fixture
def index(workspace: Path, tmp_path: Path) -> Path:
    """A copy of the index that a test may change."""
    return Path(shutil.copytree(workspace / "run.stride", tmp_path / "run.stride"))


def verdicts(run, index: Path, options: str = "") -> dict:
    outcome = run(f"query 'The French Revolution began in' --index {index} --json {options}")
    assert outcome.code == 0, outcome.err
    return outcome.records[0]


def test_training_has_asked_and_every_answer_says_what_it_is_worth(run, workspace: Path) -> None:
    opened = Index.open(workspace / "run.stride")
    asked = opened.group_attributes("calibration")["nulls"]
    losses = np.asarray(opened.array("calibration/null_losses"))
    assert len(asked) == len(losses) <= 100
    assert len({each["prompt"] for each in asked}) > 90  # different ones
    record = verdicts(run, workspace / "run.stride")
    assert record["verdict"] in ("clear", "contested", "weak", "guessing") and record["unit"] == "relative"
    judged, scored = record["judged"], min(16, record["scored_tokens"])
    assert judged["nulls"] + judged["near"] == np.isfinite(losses[:, scored - 1]).sum()
    assert len(record["tokens"]) == record["scored_tokens"] and max(record["tokens"]) == 1.0
    above = [hit["above_line"] for hit in record["hits"]]
    assert above == [hit["influence"] > record["judged"]["line"] for hit in record["hits"]]
    assert above == sorted(above, reverse=True)
    few = judged["beyond"]
    assert 0 <= few <= 0.1
    sure = judged["surer"] <= few
    assert record["verdict"] == "contested" or (record["verdict"] == "clear") == (sure and judged["held"])
    other = verdicts(run, workspace / "run.stride", "--top 0 --bottom 3")  # however many are shown
    assert other["verdict"] == record["verdict"] and other["missing"] == record["missing"]
    assert other["hits"] == []


@pytest.mark.slow
def test_the_verdict_is_of_the_response_and_not_of_how_it_is_shown(run, workspace: Path) -> None:
    plain = verdicts(run, workspace / "run.stride")
    for options in ("--top 1", "--top 40", "--lambda-ratio 0.5", "--read 20", "--read 0"):
        other = verdicts(run, workspace / "run.stride", options)
        # other influences than null prompts' have no line, and are judged by their words all the same
        like = options.startswith(("--top", "--read 2"))
        assert (other["judged"]["line"] is not None) == (other["hits"][0]["above_line"] is not None) == like
        for name in ("surer", "beyond", "nulls"):
            assert other["judged"][name] == plain["judged"][name]
        if like:
            assert other["verdict"] == plain["verdict"]


@pytest.mark.slow
def test_without_a_calibration_there_is_no_verdict_until_it_is_made(
    run, index: Path, workspace: Path
) -> None:
    """Asked again, the same prompts come to the same."""
    shutil.rmtree(index / "calibration")
    record = verdicts(run, index)
    assert record["verdict"] is None and record["judged"] is None
    assert all(hit["above_line"] is None for hit in record["hits"])
    # as after a kill between the fit and its calibration
    again = run(f"train --index {index} --rank 8")
    assert again.code == 2 and "has operators already, and no calibration" in again.err
    assert "fix: stride calibrate" in again.err
    outcome = run(f"train --index {index} --nulls 100 --json")
    assert outcome.code == 0 and "going on with their calibration" in outcome.err, outcome.err
    assert outcome.records[0]["fit"] == "closed" and outcome.records[0]["seconds"]["fit"] == 0
    assert verdicts(run, index)["judged"]["nulls"] <= 100
    assert run(f"index verify {index}").code == 0
    first, second = Index.open(workspace / "run.stride"), Index.open(index)
    for name in ("null_losses", "null_shares", "null_held", "null_near"):
        one, two = (np.asarray(each.array(f"calibration/{name}")) for each in (first, second))
        np.testing.assert_allclose(one, two, rtol=1e-4)
    assert first.group_attributes("calibration")["nulls"] == second.group_attributes("calibration")["nulls"]


def test_a_damaged_calibration_answers_nothing(run, index: Path) -> None:
    damaged = index / "calibration" / "zarr.json"
    damaged.write_bytes(damaged.read_bytes().replace(b"prompt", b"qrompt", 1))
    outcome = run(f"query 'The French Revolution began in' --index {index}")
    assert outcome.code == 3 and "stride calibrate" in outcome.err and outcome.out == ""
    # which does what it is recommended for, whatever of it is gone
    for command in ("calibrate", "calibrate", "train --overwrite"):
        again = run(f"{command} --index {index} --nulls 40")
        assert again.code == 0 and "it is made anew" in again.err, again.err
        assert run(f"query 'The French Revolution began in' --index {index}").records[0]["verdict"]
        (index / "calibration" / "manifest.json").unlink()


def test_scales_are_fitted_on_what_users_ask(workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beginnings and the model's responses, other words and the corpus's, weighed as in answers."""
    from stride_cli.api import Session
    from stride_cli.attribution import scale
    from stride_cli.attribution.options import QueryOptions

    monkeypatch.setattr(scale, "_ASKED_ABOUT", 2)
    session = Session.open(workspace / "run.stride")
    found = scale.responses_of(session.words, scale.removed_parts(session.workspace, 2))
    assert [each.generated for each in found] == [True, False] * 6
    responses = [{} if each.generated else {"response": each.response} for each in found]
    asked = [{"prompt": each.prompt, **said} for each, said in zip(found, responses, strict=True)]
    for query, own in zip(found, session.build(asked, QueryOptions()), strict=True):
        np.testing.assert_array_equal(query.ids, own.ids)
        np.testing.assert_allclose(query.weights, own.weights, rtol=1e-3)
    rows, decode = range(session.index.n_chunks), session.model.tokenizer.decode
    texts = [decode(session.index.chunk_tokens(row), skip_special_tokens=True).strip() for row in rows]
    begun = [any(text.startswith(query.prompt) for text in texts) for query in found]
    assert all(begun[::2]) and all(any(query.prompt in text for text in texts) for query in found)


@pytest.mark.slow
def test_influences_in_nats(run, index: Path, workspace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models trained again say what influences are in nats; answers do so where they are found alike."""
    from stride_cli import api
    from stride_cli.api import Session
    from stride_cli.attribution.calibration import calibrate
    from stride_cli.attribution.nats import scale_of
    from stride_cli.attribution.scale import measure_scale

    monkeypatch.setattr("stride_cli.attribution.nats._SURE", 1.0)  # two trainings of a small corpus
    pipeline = Session.open(index).pipeline()
    measured = measure_scale(pipeline, 2)
    calibrate(pipeline, 40, measured)
    scale = to_record(measured)
    chunks = Index.open(index).n_chunks
    assert scale["models"] == 2 and scale["correlation"] > 0.5
    assert 0.8 < scale["pairs"] / (4 * (2 * round(chunks / 10) + 32)) <= 1
    assert measured.sure and (scale["slope"] or scale["ceiling"]) > scale["error"] > 0
    relative, found = verdicts(run, workspace / "run.stride"), verdicts(run, index)
    assert (relative["unit"], found["unit"]) == ("relative", "nats")
    assert relative["scale"] is None and found["scale"] == scale
    for one, other in zip(relative["hits"], found["hits"], strict=True):
        assert other["document"] == one["document"]
        total = abs(one["influence"]) / one["share"]
        forecast = measured.rise(one["influence"], total, relative["loss"])
        assert other["influence"] == pytest.approx(forecast, rel=1e-2, abs=1e-6)
        assert (other.get("low"), other.get("high")) == measured.interval(other["influence"])
        assert other["above_line"] == (other["influence"] > found["judged"]["line"])
    assert verdicts(run, index, "--read 0")["unit"] == "relative"  # not what was measured
    assert scale_of(scale) == measured
    # a part is judged as the response it is of; its influences are not what null prompts' were
    session, said = Session.open(index), "1789, when"
    whole, part = (
        session.query("The French Revolution began in", response="1789, when the Estates-General", span=span)
        for span in (None, said)
    )
    assert whole.verdict.surer == part.verdict.surer and whole.line is not None and whole.scale is not None
    assert part.line is None and part.scale is None
    # a fine-tuned model's are measured with tokens alike
    monkeypatch.setattr(type(session.model), "pretrained", False)
    for decisive in (True, False):
        one = session.query("The French Revolution began in", api.QueryOptions(decisive=decisive))
        assert (one.unit, one.line is None) == (("relative", False) if decisive else ("nats", True))
    # asked again, the prompts are new and the scale stays
    assert run(f"calibrate --index {index} --nulls 50").records[0]["scale"] == scale
    assert run(f"index verify {index}").code == 0
