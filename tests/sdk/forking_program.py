"""A program that forks after everything was started, as servers that load their application first do: … URL FILE."""

import json
import os
import sys

import flywheel

PLAIN = {"model": "agent", "messages": [{"role": "user", "content": "hi"}]}


def agent(request, model):
    """Production answers by itself, the trainee by the model."""
    if model is None:
        return "production"
    with model.openai(max_retries=0) as openai:
        return openai.chat.completions.create(**request).choices[0].message.content


def work(client, runner, collector, http, url):
    """A call in production, one of a client's run, and one that is collected. Returns what was counted."""
    serve(PLAIN)
    runner.commit()
    runner.stop()
    with client.run() as run:
        with client.model().openai(max_retries=0) as openai:
            openai.chat.completions.create(**PLAIN)
        run.reward(0.5)
    http.post(f"{url}/v1/chat/completions", json=PLAIN).raise_for_status()
    exported = collector.export(f"{collector.path}.{os.getpid()}")
    collector.close()
    stats = runner.stats
    counted = {name: getattr(stats, name) for name in ("seen", "selected", "runs", "rewarded", "dropped")}
    return {**counted, "msg_id": run.msg_ids, "rows": collector.stats.rows, "exported": exported}


if __name__ == "__main__":
    url, file = sys.argv[1:]
    client = flywheel.Client(url)
    client.status()  # it has a connection now
    runner = flywheel.TrainingRunner(url, reward=lambda run, reply: 1.0, select=flywheel.SamplingRate(1.0))
    serve = runner.watch(agent)
    collector = flywheel.Collector(file)
    http = collector.http_client()
    http.post(f"{url}/v1/chat/completions", json=PLAIN).raise_for_status()  # it has a connection, too
    runner.start()
    serve(PLAIN)
    out, into = os.pipe()
    if not (child := os.fork()):
        os.write(into, json.dumps(work(client, runner, collector, http, url)).encode())
        os._exit(0)
    os.close(into)
    os.waitpid(child, 0)
    with os.fdopen(out) as found:
        in_child = json.loads(found.read())
    print(json.dumps({"child": in_child, "parent": work(client, runner, collector, http, url)}))
