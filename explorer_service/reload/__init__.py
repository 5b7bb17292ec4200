"""Stage 9, reload: engines load new versions, and prove them before they serve."""
