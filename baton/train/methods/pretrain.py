"""Next-token prediction on plain text, from scratch or continued from a base: `sft` on whole rows."""

from baton.train.methods.sft import build

__all__ = ["build"]
