"""A scripted engine in its own process, to be killed: python -m tests.support.engine_process PORT ROOT STAGING

It starts on version 0 of ROOT once this exists, and stages adapters in STAGING like `flywheel engine`; with `-` it
stages none. Each token's logprob is minus the version that sampled it. It prints what it loads and unloads, and
`gone NAME` if the files of an adapter that it holds are gone.
"""

from __future__ import annotations

import sys
import threading
from functools import partial
from pathlib import Path

from services.engine.stage import Stage
from shared.versions import version_path
from tests.support.processes import wait_for
from tests.support.script import Script
from tests.support.scripted_engine import ScriptedEngine

LOAD_S = 0.1


def main(port: str, root: str, staging: str) -> None:
    base = Path(root) / version_path(0)
    wait_for(base.exists, "version 0", 240)
    script = Script(tells_weights=True, reload_s=LOAD_S, say=partial(print, flush=True), starts_on=base)
    if staging != "-":
        script.stage = Stage(Path(root), Path(staging), keep=2)
    ScriptedEngine(int(port), script)
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
