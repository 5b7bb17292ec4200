"""The agent's side of Flywheel: runs, rewards, shadow traffic and learning, for agents of any framework.

An agent is a function `agent(request, model)`. A Model can be the trainee, the production model or a judge.
"""

from flywheel import rewards
from flywheel.async_client import AsyncClient
from flywheel.client import Client
from flywheel.collect import Collector, CollectorStats
from flywheel.config import EarlyStop, LearnConfig
from flywheel.conversation import Conversation, SimulatedUser
from flywheel.errors import (
    Away,
    ConfigError,
    FlywheelError,
    JournalMismatch,
    JudgeFailed,
    LearnError,
    NothingCompared,
    NothingKnown,
    NothingRecorded,
    NotTraining,
    Refused,
    RunError,
    TimedOut,
    TooManyFailures,
    Unreachable,
    UnsafeTool,
)
from flywheel.evaluation import Comparison, acompare, aevaluate, compare, evaluate
from flywheel.framework_tools import guard
from flywheel.judge import LLMJudge, Verdict
from flywheel.learning import alearn, learn
from flywheel.model import Model
from flywheel.play import Played, TextEnvironment, is_context_full, play
from flywheel.report import Evaluation, Report
from flywheel.results import Committed, Receipt, Receipts, Status, Version
from flywheel.reward import Reward
from flywheel.run import Run
from flywheel.runner import TrainingRunner
from flywheel.selection import Call, Marked, SamplingRate, Selected, Selection, mark, marked
from flywheel.stats import Stats
from flywheel.tasks import load_tasks
from flywheel.tools import ReadOnlyTools, RecordedTools, SubstituteTools, declare, tool
from flywheel.transport import async_http_client, http_client
from flywheel.workflow import Result

__all__ = [
    "AsyncClient",
    "Away",
    "Call",
    "Client",
    "Collector",
    "CollectorStats",
    "Committed",
    "Comparison",
    "ConfigError",
    "Conversation",
    "EarlyStop",
    "Evaluation",
    "FlywheelError",
    "JournalMismatch",
    "JudgeFailed",
    "LLMJudge",
    "LearnConfig",
    "LearnError",
    "Marked",
    "Model",
    "NotTraining",
    "NothingCompared",
    "NothingKnown",
    "NothingRecorded",
    "Played",
    "ReadOnlyTools",
    "Receipt",
    "Receipts",
    "RecordedTools",
    "Refused",
    "Report",
    "Result",
    "Reward",
    "Run",
    "RunError",
    "SamplingRate",
    "Selected",
    "Selection",
    "SimulatedUser",
    "Stats",
    "Status",
    "SubstituteTools",
    "TextEnvironment",
    "TimedOut",
    "TooManyFailures",
    "TrainingRunner",
    "Unreachable",
    "UnsafeTool",
    "Verdict",
    "Version",
    "acompare",
    "aevaluate",
    "alearn",
    "async_http_client",
    "compare",
    "declare",
    "evaluate",
    "guard",
    "http_client",
    "is_context_full",
    "learn",
    "load_tasks",
    "mark",
    "marked",
    "play",
    "rewards",
    "tool",
]
