"""Migrations of the ledger's schema. A new one is a new file in versions/; HEAD names the last one."""

HEAD = "0023"
