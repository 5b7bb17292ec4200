"""The ledger: one SQL database that says what is true. Tables, every transition between them, and the reads."""
