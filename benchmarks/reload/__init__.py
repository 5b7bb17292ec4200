"""The cost of a reload for those who chat meanwhile, on the real engine, and the size of deltas. Prints one JSON line.

    .venv/bin/python -m benchmarks.reload [--reloads 50] [--streams 8 32] [--engines 1] [--finish] [--tied]
                                          [--no-fresh] [--delta-steps 20] [--adapters 50] [--lora-only]
                                          [--chat-every-s 0.05]

`flywheel engine` and `flywheel explorer` serve a generated model of 10 M parameters in float32, staged in the engine's
own folder. A turn runs the given number of streams of 200 tokens at once. Turns alternate: nothing happens ("none"); a
version is published while the streams run ("reload"); or new weights arrive as in Trinity-RFT's explorer ("drain"). Its
`_sync_model_weights` waits until the engine is idle, polls once a second, and sends it no requests meanwhile; drain.py
models this on the same engine.

Short chats of two tokens measure a request that arrives during the event. One is due each `--chat-every-s` from the
event's begin until one is answered by the new version, whether those before have ended or not. Its first token is
measured from the time when it was due. In the turn without an event beside it, as many are due. "gap_above_ms" and
"first_token_above_ms" are the differences between these two turns, of the longest gaps and of the slowest first tokens;
"within_bound" is the share of at most 50 ms, and "beyond" has the others.

Gaps are between two events of a stream. A reply counts as failed if its status is not 200 or it ends in an error, a
short chat also if it is truncated: "failed" contains the short chats that failed, "late_failed" of "late_chats", and
"replies" is the number of streams. A turn in which a short chat has no first token is outside the bounds, and not in
"late_first_token_ms". A stream is truncated if it does not have 200 tokens, reordered if its tokens differ from the
ledger's.

"pause_ms", "gap_ms", "stage_ms" and "proof_ms" are by the explorer's clock, the mean over the engines that reloaded.
"pause_ms" contains the pause, two labels, the load, the reset of the cache, the checks of ownership and the resumption;
"gap_ms" the proof in addition. "prefill_ms" is the time of one prefill of as many tokens as the streams had when they
paused. "fresh_engine_equal": `/weight_checker` finds all tensors equal to those of an engine that is newly started on
the last version. "row_to_first_token_ms" is the time from the commit of the version's row to its first token at a
caller, which may belong to a stream that goes on; "row_to_first_chat_ms" that to the first token of a chat that this
version alone answers.

Adapters ("lora"): the same model as `model.kind: lora`, rank 8, in other processes, in pairs of turns as above; the
gaps of "gap_above_ms" are those after the event's begin. "first_load" is the first load of these turns: the engine's
very first for the first number of streams alone.
"side_by_side": four versions at once with 8 streams each, all loaded, and 32 streams of one version. "two_explorers": 8
streams at each while versions arrive. "wrong_labels" counts rows, of all of these, whose logprobs differ from those
that PEFT computes for the row's version, in float32; "largest_gap_to_peft" is the engine's largest difference, and that
of the last version merged into one folder.

Deltas: bfloat16, AdamW, median over the steps, bytes as a share of the whole; rebuilding and copying alternate.
"""
