"""The settings in which the processes of one ledger must agree, and how a difference is reported."""

from __future__ import annotations

import json

import pytest

from shared.config import Config, agreed_settings, differences


def settings(**sections: object) -> dict[str, object]:
    """As another process reads them in the ledger."""
    config = Config.model_validate({"model": {"path": "m", "kind": "lora"}, **sections})
    return json.loads(json.dumps(agreed_settings(config)))


@pytest.mark.parametrize(
    ("other", "expected"),
    [
        ({}, ""),
        ({"trainer": {"batch_size": 288}}, "trainer.batch_size is 64 here and 288 there"),
        ({"trainer": {"algorithms": {"ppo": 0.5}}}, ""),  # another weight of the same algorithm
        (
            {"trainer": {"algorithm": "sft"}},
            "trainer.learns_from is ['metric', 'rating', 'reward'] here and ['correction', 'demonstration'] there",
        ),
        ({"engine": {"max_loras": 2}}, "engine.max_loras is 4 here and 2 there; engine.max_cpu_loras is 8 here and 4"),
        ({"engine": {"tool_parser": "glm47"}}, "engine.tool_parser is None here and 'glm47' there"),
        ({"engine": {"max_cpu_loras": 8}}, ""),  # the default
        ({"model": {"path": "elsewhere", "kind": "full"}}, "model.kind is 'lora' here and 'full' there"),
    ],
)
def test_what_explorers_and_the_trainer_do_in_common_is_compared(other, expected):
    found = differences(settings(), settings(**other))
    assert found.startswith(expected) and bool(found) == bool(expected)


def test_a_setting_that_an_older_release_does_not_know_is_no_difference():
    assert differences(settings(), {"model.name": "agent"}) == ""


def test_limits_of_adapters_are_not_compared_where_versions_are_whole():
    assert not [key for key in settings(model={"path": "m"}) if "loras" in key]
