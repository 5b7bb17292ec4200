"""The ledger's schema, step by step. A new step is a new file in versions/, and HEAD names the last one."""

HEAD = "0019"
