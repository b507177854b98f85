"""The rows of a chunk: which files hold them, in what order they come, and which process trains on which."""
