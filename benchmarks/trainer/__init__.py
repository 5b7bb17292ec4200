"""The trainer's speed beside its peers': tokens of trajectories trained a second of CPU, one thread, and peak memory.

`python -m benchmarks.trainer [--peers PYTHON] [--cases CASE ...] [--turns N]` prints JSON. Everyone makes one optimizer
step (AdamW, float32) on the same tokens of the same Qwen2-type model: 4 layers of 256, vocabulary 32,000, untied. Turns
alternate, each in its contestant's own process; figures are medians of the turns. PYTHON is that of a virtual
environment with requirements/peers.txt. With `--device cuda` seconds are elapsed ones, the model has Qwen2.5-0.5B's
shape, and weights and optimizer are in bfloat16.

- flywheel: rows as the ledger has them, assembled, folded and packed into rows of 8,192 tokens; flywheel_2048 and
  flywheel_512 the same with smaller rows, flywheel_unfolded without folding.
- plain: a loop on Transformers, micro-batches of 8 sorted by length and padded, with labels; plain_lean gives the
  output layer the replies alone.
- trl_grpo: TRL's GRPOTrainer, micro-batches of 8, given the tokens by `rollout_func`; no reference, no checkpointing.
- trl_sft: TRL's SFTTrainer, micro-batches of 8 grouped by length, loss on replies, no checkpointing; trl_sft_packed
  packs instead, one row of the longest sequence's length a micro-batch.

Whole updates by the trainer's own code stand in cases of their own: dpo on `pairs` and kto on `rated` beside TRL's (one
step, micro-batches of 8 sequences sorted by length, the reference computed on the way), and hint beside reinforce_pp on
`said` (the defaults' number of steps). `fill` is how full rows are, `memory` the peak of scoring (memory.py), `ranks`
what a second rank gains (ranks.py; it wants two cores). `sizes` is what updates of larger models take on an accelerator
(sizes.py). CASE/4 is a case with the first quarter of its rows.

Tokens are those of the rows' prompts and replies for everyone, so that a contestant who computes a shared beginning
once has more of them a second. "of_limit" is 6 · (parameters of the layers · distinct tokens + those of the output
layer · sampled tokens) over the time and the rate at which this machine multiplies matrices of the model's shapes.
"""
