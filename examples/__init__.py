"""Agents that learn through Flywheel."""
