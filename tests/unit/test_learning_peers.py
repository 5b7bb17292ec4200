"""What TRL's trainers are given in the learning benchmark, and what comes of their answers."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import pytest
import torch
from transformers import PreTrainedTokenizerFast

from benchmarks.learning.cases import CASES
from benchmarks.learning.peers import PEERS, RowWriter, TrlDesk
from benchmarks.learning.world import WORDING, Reply
from examples.support_desk.desk import Ticket
from examples.tiny_model import TEMPLATE
from shared.experience import Tokens
from shared.reward import Signal

# Takes rows and writes weights, as trl_learner does: the weight is the first prompt's first token.
LEARNER = """
import json, sys, torch
from safetensors.torch import save_file
for line in sys.stdin:
    rows = json.loads(line)
    save_file({"weight": torch.full((1, 1), float(rows[0]["prompt"][0]))}, sys.argv[1])
    print(json.dumps({"rows": len(rows)}), flush=True)
"""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    """Bytes as tokens, with the demo's chat template."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    letters = pre_tokenizers.ByteLevel.alphabet()
    vocabulary = {letter: number for number, letter in enumerate(sorted(letters))}
    bpe = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    more = {"eos_token": "<|im_end|>", "additional_special_tokens": ["<|im_start|>"]}
    wrapped = PreTrainedTokenizerFast(tokenizer_object=bpe, **more)
    wrapped.chat_template = TEMPLATE
    return wrapped


def reply(tokenizer, text: str, first: int = 1) -> Reply:
    ids = np.array(tokenizer(f"{text}<|im_end|>")["input_ids"], np.int32)
    tokens = Tokens(np.array([first, 2], np.int32), ids, np.full(len(ids), -0.5, np.float32))
    return Reply(Ticket("hello", "refunds", "low"), text, tokens)


@pytest.mark.parametrize("name", PEERS)
def test_a_peer_has_the_customers_of_our_case_and_whole_steps(name):
    peer = PEERS[name]
    ours, theirs = CASES[peer.like], peer.plan
    assert name.partition("/")[0] == peer.like.partition("/")[0]
    assert (theirs.say, theirs.share, theirs.late) == (ours.say, ours.share, ours.late)
    assert {"learning_rate", "epochs", "minibatches"} <= set(peer.settings)
    assert theirs.rows % peer.settings["minibatches"] == 0


def test_a_row_has_the_sampled_tokens_and_all_signals(tokenizer):
    signals = [Signal("reward", value=0.7), Signal("rating", text="down"), Signal("comment", text="refunds , low")]
    said = reply(tokenizer, "refunds , urgent")
    row = RowWriter(tokenizer).row(said, signals)
    assert (row["prompt"], row["reply"]) == ([1, 2], said.tokens.reply_ids.tolist())
    assert row["logprobs"] == [-0.5] * len(row["reply"])
    assert row["reward"] == 0.7 and row["up"] is False
    assert WORDING.format(text="refunds , low") in tokenizer.decode(row["hint"])


def test_a_correction_is_answer_tokens_with_an_end_even_if_it_equals_the_reply(tokenizer):
    writer, said = RowWriter(tokenizer), reply(tokenizer, "refunds , urgent")
    for text in ("refunds , low", "refunds , urgent"):
        row = writer.row(said, [Signal("correction", text=text)])
        assert tokenizer.decode(row["correction"]) == f"{text}<|im_end|>"


def test_a_peer_learns_from_the_oldest_rows_once_an_update_has_its_rows_and_its_weights_are_sampled(
    tokenizer, tmp_path
):
    weights = tmp_path / "model.safetensors"
    command = [sys.executable, "-c", LEARNER, str(weights)]
    policy = torch.nn.Linear(1, 1, bias=False)
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        desk = TrlDesk(policy, RowWriter(tokenizer), 2, process, weights)
        desk.record(["a", "b", "c"], [reply(tokenizer, "no", first) for first in (5, 6, 7)], 0)
        up = [Signal("rating", text="up")]
        assert not desk.hear([("b", up, None)])
        assert desk.hear([("a", up, None), ("c", up, None)])
        assert desk.update(1) == {"rows": 2}
        assert policy.weight.item() == 6.0
        assert not desk.hear([])  # one is left
        process.stdin.close()


def test_a_peer_is_handed_rows_of_earlier_updates_again_and_the_same_number_each_time(tokenizer, tmp_path):
    command = [sys.executable, "-c", LEARNER, str(tmp_path / "weights.safetensors")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        weights = tmp_path / "weights.safetensors"
        desk = TrlDesk(torch.nn.Linear(1, 1, bias=False), RowWriter(tokenizer), 2, process, weights, again=2)
        desk.record(list("abcdef"), [reply(tokenizer, "no", first) for first in range(5, 11)], 0)
        for names in ("ab", "cd", "ef"):
            assert desk.hear([(name, [Signal("rating", text="up")], None) for name in names])
            assert desk.update(1) == {"rows": 6}
        process.stdin.close()


def test_a_process_of_a_peer_that_ends_ends_the_benchmark(tokenizer, tmp_path):
    command = [sys.executable, "-c", "input(); raise SystemExit(3)"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        desk = TrlDesk(torch.nn.Linear(1, 1), RowWriter(tokenizer), 0, process, tmp_path / "none")
        with pytest.raises(SystemExit, match="ended with 3"):
            desk.update(0)
