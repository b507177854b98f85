"""Imports of `forkserver`'s server alone: the environment first, then libraries, then work on them."""

import contextlib
import gc
import importlib
import os

ENVIRONMENT = dict(os.environ)  # as the server was given it

os.environ.update(
    _KFP_RUNTIME="true",  # kfp imports no client
    PYTORCH_NVML_BASED_CUDA_CHECK="1",  # torch looks for GPUs without a CUDA context
    TQDM_DISABLE="1",  # stages write to a log, see `events.setup_environment`
)
with contextlib.suppress(ImportError):
    from baton.train import imports, lazy_imports

    # PEFT imports it where it is installed, and it the compiler: seconds for what few runs use.
    lazy_imports.defer({"bitsandbytes": imports.DEFERRED["bitsandbytes"]})
for name in (
    "kfp.dsl.executor",
    "baton.train.attempt",
    "baton.train.methods.sft",
    "baton.train.methods.grpo",
    "baton.data.tokenize",
    "baton.data.split",
    "baton.evaluate.evaluate",
    "baton.export.export",
    "datasets",
):
    with contextlib.suppress(ImportError):  # the stage that needs it raises it
        importlib.import_module(name)
with contextlib.suppress(ImportError):
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models: four tenths of a second
gc.collect()
gc.freeze()  # no garbage collection of a stage visits these objects, and copies their pages
