"""Models on this machine: loading, generation, rewards, memory."""
