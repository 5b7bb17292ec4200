"""What a command says that refuses to start, as a fork of a process that has imported everything."""

from __future__ import annotations

from pathlib import Path

from tests.support.lives import Lives


def refusal(lives: Lives, log: Path, *arguments: str, status: int = 1, **environ: str) -> str:
    """The one line that the command says before it ends with that status. log: a file for its output."""
    log.unlink(missing_ok=True)
    with lives.begin(list(arguments), log, **environ) as life:
        assert life.wait(240) == status, life.output()[-1500:]
        assert "Traceback" not in life.output()
        (line,) = [line for line in life.output().splitlines() if line.startswith("flywheel: ")]
    return line
