"""Algorithms: one file each, which starts with its formula, paper and equation; no DeepSpeed, SQL or I/O."""
