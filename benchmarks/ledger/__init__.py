"""The cost of the ledger: empty and full, alone and beside its peer, on SQLite and PostgreSQL. Prints one JSON line.

    .venv/bin/python -m benchmarks.ledger [--peers PYTHON] [--only PART ...] [--rows 1000000]

Parts: record, transaction, flat, snapshot, size, conversations, status, writers; the file of each describes it. All
databases are durable (fsync on).
"""
