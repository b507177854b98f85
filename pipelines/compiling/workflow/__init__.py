"""The Argo workflow that Kubeflow Pipelines makes of a compiled file: how large it is, and grows to be."""
