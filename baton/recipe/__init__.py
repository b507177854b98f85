"""The recipe: the user's one document. YAML carries values, this schema carries the defaults.

`model` has the adapter, `data` its quality checks, `training` the schedule and `methods` the methods' sections. `run`
has chunks, store, hooks and tracking, `evaluation` the export, `cluster` the pods, `search` sweeps, phases and
retraining. `recipe` holds them together, with the rules between them.
"""

from baton.recipe.base import Name, Quantity
from baton.recipe.cluster import Resources
from baton.recipe.data import Data, Quality
from baton.recipe.evaluation import GATE, Evaluation, Tasks
from baton.recipe.methods import GRPO, SPECS, Completions, Generation, RewardFunction
from baton.recipe.model import Adapter, FromScratch, Model, NamedModel, Tokenizer, TrainTokenizer
from baton.recipe.recipe import Recipe
from baton.recipe.run import Chunks, Hook, Hooks, Keep, Preemption, Signing, Store
from baton.recipe.search import ACCEPTED, MAX_TRIALS, PREVIOUS, Search
from baton.recipe.training import Curriculum, Group, Guard, LRFind, Router, Trainable, Training

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
