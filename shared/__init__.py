"""Code that both services share: the ledger, the version folder, the configuration, and common types."""
