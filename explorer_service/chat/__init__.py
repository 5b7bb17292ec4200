"""Stage 1, chat: send a request to an engine, its reply to the caller, and the sampled tokens to the ledger."""
