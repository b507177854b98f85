"""What only a CUDA GPU can show."""
