"""Runs, and what they leave."""
