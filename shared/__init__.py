"""What the two services share: the ledger, the version folder, the configuration, and the words for all three."""
