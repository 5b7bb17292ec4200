"""The service that agents call: chat → record → feedback → commit, and reload of new versions."""
