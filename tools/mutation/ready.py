"""Work that is the same in each fork, done before."""

from transformers.conversion_mapping import get_checkpoint_conversion_mapping

get_checkpoint_conversion_mapping("llama")  # compiles the patterns of all models
