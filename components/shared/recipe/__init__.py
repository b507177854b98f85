"""The recipe: the user's one document. YAML carries values, this schema carries the defaults.

One file per part: `model`, `data` with `quality`, `adapter`, `training` with `methods` and `schedule`, `hooks`,
`chunks`, `evaluation`, `export`, `tracking`, `pods`, `retrain`, `sweep`; `recipe` holds them together, and `rules` are
those between them.
"""

from baton.components.shared.recipe.adapter import Adapter
from baton.components.shared.recipe.base import Name, Quantity
from baton.components.shared.recipe.chunks import Chunks, Keep, Preemption, Signing, Store
from baton.components.shared.recipe.data import Data
from baton.components.shared.recipe.evaluation import GATE, Evaluation, Tasks
from baton.components.shared.recipe.hooks import Hook, Hooks
from baton.components.shared.recipe.methods import GRPO, SPECS, Completions, Generation, RewardFunction
from baton.components.shared.recipe.model import FromScratch, Model, NamedModel, Tokenizer, TrainTokenizer
from baton.components.shared.recipe.phases import PREVIOUS
from baton.components.shared.recipe.pods import Resources
from baton.components.shared.recipe.quality import Quality
from baton.components.shared.recipe.recipe import Recipe
from baton.components.shared.recipe.retrain import ACCEPTED
from baton.components.shared.recipe.schedule import Curriculum, Group, Guard, LRFind, Router, Trainable
from baton.components.shared.recipe.sweep import MAX_TRIALS, Search
from baton.components.shared.recipe.training import Training

__all__ = [
    "ACCEPTED",
    "GATE",
    "GRPO",
    "MAX_TRIALS",
    "PREVIOUS",
    "SPECS",
    "Adapter",
    "Chunks",
    "Completions",
    "Curriculum",
    "Data",
    "Evaluation",
    "FromScratch",
    "Generation",
    "Group",
    "Guard",
    "Hook",
    "Hooks",
    "Keep",
    "LRFind",
    "Model",
    "Name",
    "NamedModel",
    "Preemption",
    "Quality",
    "Quantity",
    "Recipe",
    "Resources",
    "RewardFunction",
    "Router",
    "Search",
    "Signing",
    "Store",
    "Tasks",
    "Tokenizer",
    "TrainTokenizer",
    "Trainable",
    "Training",
]
