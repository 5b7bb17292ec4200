"""A run's reward teaches its calls here what it teaches them in Trinity."""

from __future__ import annotations

import statistics
from pathlib import Path

import pytest

from services import cli
from services.trinity.convert import convert
from services.trinity.key import Given
from shared.config import Config
from shared.experience import Experience
from tests.support.trinity_files import EXPLORER, KINDS, REACT, TRAINER, as_yaml
from tests.unit.test_groups import advantages, row
from trainer_service.algorithms.registry import algorithm

FILES = {**{name: [as_yaml(keys)] for name, keys in KINDS.items()}, "react": [REACT], "pair": [EXPLORER, TRAINER]}


def runs(*outcomes_and_turns: tuple[float, int]) -> list[Experience]:
    """Runs of one task, whose turns continue one another; each outcome was sent once."""
    rows: list[Experience] = []
    for run, (outcome, turns) in enumerate(outcomes_and_turns):
        prompt, parent = (1, 2), None
        for _ in range(turns):
            number = len(rows) + 1
            rows.append(row(number, "a", str(run), outcome, outcome=outcome, prompt=prompt, parent_id=parent))
            prompt, parent = (*prompt, 50 + number, 51, 7), rows[-1].msg_id
    return rows


def of_trinity(*outcomes_and_turns: tuple[float, int]) -> list[list[float]]:
    """Its step_wise_grpo: the last call's reward, compared with the other runs', for each of the two tokens a call."""
    rewards = [outcome for outcome, _ in outcomes_and_turns]
    mean, deviation = statistics.mean(rewards), statistics.stdev(rewards)
    return [[(outcome - mean) / deviation] * 2 * turns for outcome, turns in outcomes_and_turns]


@pytest.mark.parametrize(
    "theirs",
    [
        {"algorithm.algorithm_type": "multi_step_grpo"},
        {"algorithm.algorithm_type": "grpo", "algorithm.advantage_fn": "step_wise_grpo"},
    ],
    ids=["multi_step_grpo", "grpo"],
)
@pytest.mark.parametrize(
    ("given", "first", "last"),
    [([(1, 2), (1, 5), (0, 3), (0, 3)], 0.87, -0.87), ([(1, 2), (0, 4), (0, 4), (0, 5)], 1.5, -0.5)],
    ids=["two of four", "one of four"],
)
def test_each_call_of_a_run_has_the_advantage_that_trinity_gives_it(theirs, given, first, last):
    done = convert(Given({"model.model_path": "/m", **theirs}))
    trainer = Config.model_validate(done.flywheel()).trainer
    got, _ = advantages(algorithm(trainer.algorithm, trainer), runs(*given))
    assert got == [pytest.approx(one, rel=1e-4) for one in of_trinity(*given)]
    assert (round(got[0][0], 2), round(got[-1][-1], 2)) == (first, last)
    assert not done.lost


@pytest.mark.parametrize("kind", FILES)
def test_no_file_is_answered_with_the_advice_to_change_the_credit(kind, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for number, text in enumerate(FILES[kind]):
        Path(f"{number}.yaml").write_text(text, encoding="utf-8")
    cli.main(["convert-config", *(f"{number}.yaml" for number in range(len(FILES[kind])))])
    said = capsys.readouterr().out
    assert "credit" not in said and '"each"' not in said
    assert "credit" not in (Path("learn.yaml").read_text() if Path("learn.yaml").exists() else "")
