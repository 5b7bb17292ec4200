"""A scripted engine as a process of its own, to be killed: python -m tests.support.engine_process PORT ROOT STAGING

It starts on version 0 of ROOT once that is there, and stages adapters in STAGING, as `flywheel engine` does; `-`: it
stages none. Each token's logprob is minus the version that sampled it. It says what it loads and unloads, and
`gone NAME` when the files of an adapter that it has are not there any more.
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
    wait_for(base.exists, "version 0", 60)
    script = Script(tells_weights=True, reload_s=LOAD_S, say=partial(print, flush=True), starts_on=base)
    if staging != "-":
        script.stage = Stage(Path(root), Path(staging), keep=2)
    ScriptedEngine(int(port), script)
    print("ready", flush=True)
    threading.Event().wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
