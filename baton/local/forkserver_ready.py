"""What the server of `baton.local.forkserver` imports last: work that is the same in each stage."""

import gc

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models: four tenths of a second
gc.collect()
gc.freeze()  # no collection of a stage goes through what is imported here, nor copies its pages
