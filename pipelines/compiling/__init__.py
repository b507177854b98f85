"""From a recipe file to the package that Kubeflow and the local engine run."""
