"""The trainer's speed beside its peers': trained tokens of trajectories per second of CPU, one thread, and peak memory.

`python -m benchmarks.trainer [--peers PYTHON] [--cases CASE ...] [--turns N]` prints JSON. Every contestant makes one
optimizer step (AdamW, float32) on the same tokens of the same Qwen2-type model: 4 layers of 256, vocabulary 32,000,
untied. Turns alternate, each in its contestant's own process; figures are medians over the turns. PYTHON is that of a
virtual environment with requirements/peers.txt. With `--device cuda`, seconds are elapsed seconds, the model has
Qwen2.5-0.5B's shape, and weights and optimizer are in bfloat16. A turn is then four steps; the first is not counted.

- flywheel: rows as in the ledger, assembled, folded and packed into rows of 8,192 tokens; flywheel_2048 and
  flywheel_512 the same with smaller rows, flywheel_unfolded without folding.
- plain: a loop on Transformers, micro-batches of 8 sorted by length and padded, with labels; plain_lean sends only the
  replies through the output layer.
- trl_grpo: TRL's GRPOTrainer, micro-batches of 8, with the tokens from `rollout_func`; no reference, no checkpointing.
- trl_sft: TRL's SFTTrainer, micro-batches of 8 grouped by length, loss on replies, no checkpointing; trl_sft_packed
  packs instead, one row of the longest sequence's length in each micro-batch (on an accelerator eight).

Whole updates by the trainer's own code have their own cases: dpo on `pairs` and kto on `rated` beside TRL's (one step,
micro-batches of 8 sequences sorted by length, the reference computed with each), and hint beside reinforce_pp on `said`
(the default number of steps). `fill` is how full rows are, `memory` the peak of scoring (memory.py), `ranks` the gain
from a second rank (ranks.py; it needs two cores). `sizes` is the cost of updates of larger models on an accelerator
(sizes.py). CASE/4 is a case with the first quarter of its rows.

Tokens are those of the rows' prompts and replies for every contestant, so one that computes a shared prefix once has
more of them per second. "of_limit" is 6 · (parameters of the layers · distinct tokens + those of the output layer ·
sampled tokens) over the time and the rate at which this machine multiplies matrices of the model's shapes.
"""
