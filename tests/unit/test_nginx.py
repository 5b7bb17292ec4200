"""The block for nginx on the explorer's page names the caller's address and the Host that the caller sent."""

from __future__ import annotations

import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs/explorer.md"


def headers_for_the_explorer() -> dict[str, str]:
    (block,) = re.findall(r"```nginx\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    return dict(re.findall(r"^ *proxy_set_header (\S+) (\S+);", block, re.MULTILINE))


def test_nginx_replaces_the_address_that_a_caller_claims_to_have():
    """The explorer believes the header from its own machine, and nginx passes on the one that the caller sent."""
    assert headers_for_the_explorer()["X-Forwarded-For"] == "$remote_addr"


def test_nginx_passes_on_the_host_that_the_explorer_compares_with_its_own():
    """nginx's own value is the address of the explorer, which is always allowed. $http_host has the port."""
    assert headers_for_the_explorer()["Host"] == "$http_host"
