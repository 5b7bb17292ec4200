"""Backends of an optimizer step: DeepSpeed."""
