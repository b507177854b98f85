"""What the warm server imports first, and nobody else: the environment for all that follows."""

import os

ENVIRONMENT = dict(os.environ)
"""The environment that the server was given."""

os.environ.update(
    _KFP_RUNTIME="true",  # kfp imports no client
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # torch looks for GPUs without a CUDA context
)
