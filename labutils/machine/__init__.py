"""What this machine is and has: its GPU, its CPUs, what is free."""
