"""What labels of tokens stand for."""

IGNORED = -100
"""Label of a token that does not count in the loss, as in torch's cross entropy."""
