"""What a training step takes: predicted, without running it."""
