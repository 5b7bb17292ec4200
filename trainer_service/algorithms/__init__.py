"""Algorithms: one file each, with its formula, paper and equation on top; free of DeepSpeed, SQL and I/O."""
