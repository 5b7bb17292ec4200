"""What DeepSpeed refuses is named by its setting, and a lost rank is not taken for such a refusal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from deepspeed.runtime.config import DeepSpeedConfig
from deepspeed.runtime.zero.config import DeepSpeedZeroConfig

from shared.config.deepspeed import PLACES, check_deepspeed
from shared.errors import ConfigError
from tests.integration.test_update import build
from tests.support.models import make_tiny_model
from trainer_service.errors import RankLost
from trainer_service.ranks import together


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base")


def test_a_learning_rate_that_is_no_number_is_named(tmp_path, base):
    with pytest.raises(ConfigError, match=r"trainer\.deepspeed\.optimizer\.params\.lr='1e-6'.*positive number"):
        build(tmp_path, base, deepspeed={"optimizer": {"params": {"lr": "1e-6"}}})


@pytest.mark.parametrize(
    ("section", "said"),
    [
        ({"zero_optimization": {"stage": 7}}, "trainer.deepspeed.zero_optimization.stage=7: input should be 0, 1"),
        ({"zero_optimization": {"stag": 3}}, "trainer.deepspeed.zero_optimization.stag=3: DeepSpeed has no such key"),
        (
            {"zero_optimization": {"stage": 2, "offload_optimizer": {"device": "gpu"}}},
            "trainer.deepspeed.zero_optimization.offload_optimizer.device='gpu': input should be 'none'",
        ),
        ({"optimizer": {"type": "Foo"}}, "trainer.deepspeed: DeepSpeed refuses its configuration (Foo is not a supp"),
    ],
)
def test_keys_that_deepspeed_refuses_are_named_with_value_and_reason(section, said, tmp_path, base):
    with pytest.raises(ConfigError) as error:
        build(tmp_path, base, deepspeed=section)
    assert str(error.value).startswith(said) and str(error.value).endswith("correct it")
    assert "\n" not in str(error.value)


def keys_that_deepspeed_reads() -> set[str]:
    """The keys that the installed DeepSpeed looks for at the top of its configuration."""
    found: set[str] = set()

    class Noting(dict):
        def __contains__(self, key: object) -> bool:
            found.add(str(key))
            return super().__contains__(key)

        def get(self, key: str, default: object = None) -> object:
            found.add(key)
            return super().get(key, default)

        def keys(self) -> Any:
            return self  # `in` it is noted, too

    DeepSpeedConfig(Noting(train_batch_size=1))
    return found


def test_a_key_that_deepspeed_reads_is_taken_or_its_counterpart_named():
    read = keys_that_deepspeed_reads()
    assert {"zero_optimization", "log_level", "comet", "bf16"} < read
    for key in sorted(read):
        try:
            check_deepspeed({key: {}})
        except ValueError as exc:
            assert "is not taken; set trainer." in str(exc), key


def test_the_keys_of_zero_are_deepspeed_s():
    assert set(DeepSpeedZeroConfig.model_fields) == set(PLACES["zero_optimization"])


def test_a_rank_that_is_lost_while_deepspeed_begins_is_not_taken_for_a_wrong_configuration(tmp_path, base, monkeypatch):
    """The configuration would be given up for good; a lost rank is started again."""

    def lose(**_: object) -> None:
        raise torch.distributed.DistNetworkError("Broken pipe")

    monkeypatch.setattr("deepspeed.initialize", lose)
    with pytest.raises(RankLost), together():
        build(tmp_path, base)
