"""What a training step takes: measured."""
