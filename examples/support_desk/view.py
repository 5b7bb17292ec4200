"""The live terminal view: episodes, reward, version in service, policy lag, time left. In a pipe: plain lines."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from examples.support_desk.customers import Episode

WINDOW = 200  # episodes in the moving average
_BARS = "▁▂▃▄▅▆▇█"
PLAIN_EVERY_S = 10.0


@dataclass(frozen=True, slots=True)
class Frame:
    """The data of one refresh."""

    episodes: Sequence[Episode]
    goal: int | None  # episodes
    failures: int
    elapsed_s: float
    limit_s: float | None
    version: int | None  # in service
    lag_versions: int
    rows: dict[str, int]
    trainer_step: int

    @property
    def reward(self) -> float:
        recent = self.episodes[-WINDOW:]
        return sum(e.reward for e in recent) / len(recent) if recent else 0.0

    @property
    def done(self) -> float:
        """The fraction of the demo that is done, 0 to 1."""
        by_count = len(self.episodes) / self.goal if self.goal else 0.0
        by_time = self.elapsed_s / self.limit_s if self.limit_s else 0.0
        return min(1.0, max(by_count, by_time))

    @property
    def to_go_s(self) -> float | None:
        return self.elapsed_s * (1 - self.done) / self.done if self.done > 0.02 else None


class View:
    """The view as a context manager: `with View(quiet) as view: view.show(frame)`."""

    def __init__(self, quiet: bool) -> None:
        self._console = Console(stderr=quiet)  # --json reserves stdout for its one line
        self._live = Live(console=self._console, refresh_per_second=4) if self._console.is_terminal else None
        self._last_line = 0.0

    def __enter__(self) -> View:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def say(self, text: str) -> None:
        """Print one line above the live view."""
        self._console.print(text, highlight=False)

    def show(self, frame: Frame) -> None:
        """Draw the frame. Without a terminal, print a line every PLAIN_EVERY_S."""
        if self._live:
            self._live.update(_panel(frame))
        elif time.monotonic() - self._last_line > PLAIN_EVERY_S:
            self._last_line = time.monotonic()
            to_go = f"{frame.to_go_s:.0f} s to go" if frame.to_go_s is not None else ""
            self.say(
                f"{frame.elapsed_s:5.0f} s  {len(frame.episodes):5d} episodes  reward {frame.reward:.2f}  "
                f"version {frame.version}  lag {frame.lag_versions}  failed {frame.failures}  {to_go}"
            )
            sys.stdout.flush()


def _panel(frame: Frame) -> Panel:
    table = Table.grid(padding=(0, 3))
    rate = len(frame.episodes) / frame.elapsed_s if frame.elapsed_s > 1 else 0.0
    of_goal = f" of {frame.goal}" if frame.goal else ""
    table.add_row("episodes", f"{len(frame.episodes)}{of_goal}  ({rate:.0f}/s, {frame.failures} failed)")
    table.add_row("reward", f"[bold green]{frame.reward:.2f}[/]  mean of the last {WINDOW}")
    table.add_row("version in service", f"[bold cyan]{frame.version}[/]  policy lag {frame.lag_versions}")
    table.add_row("trainer", f"{frame.trainer_step} updates")
    table.add_row("rows", "  ".join(f"{name.lower()} {count}" for name, count in frame.rows.items()))
    table.add_row("time to go", "…" if frame.to_go_s is None else f"{frame.to_go_s:.0f} s")
    bar = ProgressBar(total=1.0, completed=frame.done)
    return Panel(
        Group(table, Text(sparkline([e.reward for e in frame.episodes]), style="green"), bar),
        title="Flywheel: a support desk that learns from its customers",
    )


def sparkline(rewards: Sequence[float], width: int = 60) -> str:
    """Return the reward over time as one line of text."""
    if not rewards:
        return ""
    size = max(1, len(rewards) // width)
    means = [sum(part) / len(part) for k in range(0, len(rewards), size) if (part := rewards[k : k + size])]
    return "".join(_BARS[min(7, int(mean * 8))] for mean in means[-width:])
