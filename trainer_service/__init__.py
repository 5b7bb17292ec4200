"""The service that learns: claim → batch → update → publish."""
