"""Example agents that learn through Flywheel."""
