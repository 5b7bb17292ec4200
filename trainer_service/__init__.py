"""The trainer: claim → batch → update → publish."""
