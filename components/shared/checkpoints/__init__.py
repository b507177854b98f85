"""Checkpoints of a run: what their manifests say, which there are, which stay, what they prove."""
