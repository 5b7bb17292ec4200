"""What a reload costs those who chat meanwhile, on the real engine, and how small deltas are. Prints one JSON line.

    .venv/bin/python -m benchmarks.reload [--reloads 50] [--streams 8 32] [--engines 1] [--finish] [--tied]
                                          [--no-fresh] [--delta-steps 20] [--adapters 50] [--lora-only]

A model of 10 M parameters, made here, is served by `flywheel engine` and `flywheel explorer` in float32, staged on a
folder of the engine's own. A turn is so many streams of 200 tokens at once. In turns: nothing happens ("none"); a
version is published when the streams are under way ("reload"); and the way of Trinity-RFT's explorer ("drain"), whose
`_sync_model_weights` waits until the engine is idle, asking each second, and gives it no requests meanwhile: modelled
here in drain.py, on the same engine. Short chats, one after the other, show what somebody meets who comes during it.

Gaps are between two events of a stream. A reply counts as failed when it is no 200 or ends in an error, as truncated
when it has not 200 tokens, as reordered when its tokens are not those that the ledger has. "engine_ms" is what the
engine's own answers to pause, load and resume took; "prefill_ms" is one prefill of as many tokens as the streams had
when they stood still. "fresh_engine_equal": `/weight_checker` compares equal, all tensors, with an engine that is
started anew on the last version.

Adapters ("lora"): the same model as `model.kind: lora`, rank 8, other processes; each turn in which a version is
published is followed by one that loads nothing ("none"), with as many short chats. "gap_above_ms" and
"first_token_above_ms" are what the one has above the other: the longest gap, and the slowest first token. "first_load"
is the very first of them all. "side_by_side": four versions at once with 8 streams each, all loaded, and 32 streams of
one version. "two_explorers": 8 streams at each while versions come in. "wrong_labels" are rows, of all of these, whose
logprobs are not those that PEFT computes by the version that the row names, in float32; "largest_gap_to_peft" is how
far the engine's are at most, and those of the last version merged into one folder.

Deltas: bfloat16, AdamW, median of so many steps, bytes as a share of the whole; rebuilding and copying in turns.
"""
