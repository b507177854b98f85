"""Submits, schedules and follows runs on a Kubeflow Pipelines endpoint."""
