"""A program whose functions hang, for tests that it ends all the same: python hanging_program.py WHAT URL FOLDER."""

import sys
import threading

import flywheel


def hangs(*_):
    """Returns never."""
    threading.Event().wait()


def agent(request, model):
    """Production answers; the trainee hangs."""
    return "production" if model is None else hangs()


def learns(url, folder):
    """A workflow that hangs."""
    given = {"require_trainer": False, "progress": False, "timeout_s": 0.2, "url": url, "folder": folder}
    print(flywheel.learn(lambda task: hangs(), [{"n": 0}], **given).failures)


def shadows(url, user):
    """A trainee that hangs, in a call or in a whole conversation."""
    select = flywheel.SamplingRate(1.0)
    with flywheel.TrainingRunner(url, reward=lambda run, reply: 1.0, select=select, timeout_s=0.2) as runner:
        chat = runner.conversation(agent, user=user)
        chat.say("hello")
        chat.end()
    print(dict(runner.stats.failed))


if __name__ == "__main__":
    what, url, folder = sys.argv[1:]
    if what == "learn":
        learns(url, folder)
    else:
        shadows(url, None if what == "call" else "recorded")
