"""What a reward function of TrainingRunner is told."""

from __future__ import annotations

import flywheel

from tests.sdk.test_runner import PRODUCTION, agent, ask


def test_a_reward_may_compare_the_trainee_s_reply_with_the_request_and_production_s_reply(explorer):
    seen = []

    def compares(run: flywheel.Run, reply: str, call: flywheel.Call) -> float:
        seen.append((call.request["text"], call.reply))
        return float(reply == call.reply)

    runner = flywheel.TrainingRunner(explorer.url, agent, compares, select=flywheel.SamplingRate(1.0))
    with runner:
        ask(runner.watch(agent, production=PRODUCTION))
    assert seen == [("t0", "production: t0")]
    assert (runner.stats.rewarded, runner.stats.reward_mean) == (1, 0.0)
