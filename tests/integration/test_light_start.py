"""Commands parse their arguments and check the configuration before anything heavy is imported."""

from __future__ import annotations

import json
import subprocess
import sys

from services import cli
from tests.support.processes import run_flywheel

HEAVY = {"torch", "transformers", "vllm", "sqlalchemy", "fastapi", "starlette", "aiohttp", "httpx", "numpy", "rich"}
LIGHT_START = """
import json, sys
from services.cli import COMMANDS, build_parser, main

parser = build_parser()
names_after_parsing = [name.partition(".")[0] for name in sys.modules]
more = {"export": ["--out", "x.jsonl"], "import": ["x.jsonl"], "archive": ["--to", "x"], "train": ["--from", "x"]}
more |= {"export-model": ["--version", "1", "--to", "x"], "backup": ["--to", "x"], "promote": ["1"]}
configured = [name for name in COMMANDS if name not in ("demo", "convert-config")]
statuses = [main([name, "-c", "none.yaml", *more.get(name, [])]) for name in configured]
statuses.append(main(["convert-config", "none.yaml"]))
names_after_config = [name.partition(".")[0] for name in sys.modules]
assert len(statuses) == len(COMMANDS) - 1
print(json.dumps([names_after_parsing, statuses, names_after_config]))
"""


def test_parsing_and_a_wrong_configuration_need_no_heavy_import():
    ended = subprocess.run([sys.executable, "-c", LIGHT_START], capture_output=True, text=True, check=True)
    parsing, statuses, configuration = json.loads(ended.stdout)
    assert not (HEAVY | {"pydantic", "yaml"}) & set(parsing)
    assert set(statuses) == {2}
    assert not HEAVY & set(configuration)


def test_help_names_every_command():
    ended = run_flywheel("--help")
    assert ended.returncode == 0
    listed = [line.split()[0] for line in ended.stdout.splitlines() if line.startswith("    ") and line.strip()]
    assert set(cli.COMMANDS) <= set(listed)
