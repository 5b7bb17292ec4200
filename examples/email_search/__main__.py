"""`python -m examples.email_search`: an agent learns to find mails, to read them and to answer."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import flywheel

from examples.email_search import tiny
from examples.email_search.agent import answer_by_mail
from examples.email_search.reward import judged
from examples.email_search.world import MOST_FOUND, Mailbox, Visit, load_questions, make_questions, split, task_of
from examples.run import Example, parser, run

ABOUT = "email_search: 5,000 mails, 400 questions; learned: which words to search, which fact to answer, when to pass"


def main() -> int:
    options = parser("email_search", ABOUT)
    options.add_argument("--db", type=Path, help="a mailbox in ART's SQLite schema; wants --questions")
    options.add_argument("--questions", type=Path, help="questions as JSONL, with the fields of ART's data set")
    options.add_argument("--tool-weights", action="store_true", help="reward the tool calls, not the answer")
    options.add_argument("--judge", help="base URL of a model, named judge, that judges answers")
    args = options.parse_args()
    if (args.db is None) != (args.questions is None):
        options.error("--db and --questions belong together: questions are about the mails of one mailbox")
    try:
        mailbox = Mailbox.generated() if args.db is None else Mailbox.open(args.db)
        questions = {one.id: one for one in (load_questions(args.questions) if args.questions else make_questions())}
    except (OSError, ValueError) as error:
        sys.exit(f"email_search: {error}")
    limit, agent_options = (MOST_FOUND, {}) if args.url else (tiny.FOUND, tiny.AGENT)
    judge = flywheel.LLMJudge(flywheel.Model.of(args.judge, "judge"), "Is the answer right?") if args.judge else None

    async def workflow(task: dict[str, Any], model: flywheel.Model) -> Visit:
        visit = Visit(mailbox, questions[task["id"]], limit)
        visit.last_text = await answer_by_mail({**task, "mail": visit}, model, **agent_options)
        return visit

    async def score(reply: Visit) -> flywheel.Reward:
        return await judged(reply, judge, by_tools=args.tool_weights)

    tasks, held_out = ([task_of(one) for one in some] for some in split(list(questions.values())))
    example = Example(
        "email_search", ABOUT, workflow, score, tasks, held_out, tiny.recipe, tiny.ENGINE, tiny.TRAINER,
        tiny.LEARN,
    )  # fmt: skip
    return run(example, args)


if __name__ == "__main__":
    sys.exit(main())
