"""Baton: language models trained as a Kubeflow pipeline, in chunks that end on the same bits."""
