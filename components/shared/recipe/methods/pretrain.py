"""Next-token prediction on plain text."""

from dataclasses import replace

from baton.components.shared.recipe.methods import sft

SPEC = replace(sft.SPEC, name="pretrain", formats=("text",))
