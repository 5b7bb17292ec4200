"""The cost of the agent's side: `python -m benchmarks.agent_sdk [--share N] [--only PART …]` prints one JSON object.

Explorer, engine and trainer run in their own processes; each figure is compared with the same calls without the
package, in the same run. Parts: import, wheel_kb, production, chat_cpu, learn, memory, overload.
"""

from pathlib import Path
from typing import Any

PARTS = ("import", "wheel_kb", "production", "chat_cpu", "learn", "memory", "overload")
ROOT = Path(__file__).resolve().parents[2]
HI: list[Any] = [{"role": "user", "content": "hi"}]
