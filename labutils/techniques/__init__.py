"""One file per technique. They import torch, and never each other."""
