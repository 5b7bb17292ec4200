"""The service that agents talk to: chat → record → feedback → commit, and reload of new versions."""
