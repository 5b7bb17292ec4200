"""The model of these tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.models import make_tiny_model


@pytest.fixture(scope="package")
def base(tmp_path_factory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "base", dtype="bfloat16")
