"""What is trained: text, GPT-2, and how a config puts them together."""
