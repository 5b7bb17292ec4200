"""What carries out an optimizer step: DeepSpeed."""
