"""Outputs for the figures of updates: a file, Prometheus, and the installed trackers."""
