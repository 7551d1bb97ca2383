"""What an experiment is. Nothing here imports torch."""
