"""A program that learns, for tests that kill it: python learn_program.py URL FOLDER TASKS RUNS."""

import sys

import flywheel


async def workflow(task, model, run):
    """Two turns; now and then an attempt breaks after it has said a reward."""
    async with model.async_openai(max_retries=0) as openai:
        for turn in range(2):
            said = [{"role": "user", "content": f"{task['n']} {run.run_id} {turn}"}]
            await openai.chat.completions.create(model=model.name, messages=said)
    if task["n"] % 5 == 0 and run.run_id.count(".") == 1:  # the first attempt
        run.reward(99.0)
        raise RuntimeError("a broken attempt")
    return 1.0


if __name__ == "__main__":
    url, folder, tasks, runs = sys.argv[1:]
    report = flywheel.learn(
        workflow,
        [{"n": n} for n in range(int(tasks))],
        url=url,
        folder=folder,
        runs_per_task=int(runs),
        at_once=4,
        require_trainer=False,
        max_failed_share=1.0,
        progress=False,
    )
    print(report.runs, report.stopped)
