"""The processes of a chunk: how they start, find each other, are watched, and learn that their machine is preempted."""
