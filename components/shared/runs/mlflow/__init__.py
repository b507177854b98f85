"""MLflow: what a run tells it, and by which client."""
