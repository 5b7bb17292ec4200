"""The ledger: one SQL database, which holds the state of the system. Tables, all transitions, and all queries."""
