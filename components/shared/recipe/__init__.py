"""The recipe: the user's one document. YAML carries values, this schema carries the defaults.

One file per part: `model`, `data`, `adapter`, `training` with `methods` and `schedule`, `hooks`, `chunks`, `outcome`,
`pods`; `recipe` holds them together.
"""

from components.shared.recipe.adapter import Adapter
from components.shared.recipe.base import Name, Quantity, Section
from components.shared.recipe.chunks import MAX_CHUNKS, Chunks, Keep, Preemption, Store
from components.shared.recipe.data import COLUMNS, Data
from components.shared.recipe.hooks import Hook, Hooks
from components.shared.recipe.methods import CPO, DPO, GRPO, KTO, ORPO, RLOO, Generation, Reward, RewardFunction
from components.shared.recipe.model import FromScratch, Model, Quantization, Tokenizer, TrainTokenizer
from components.shared.recipe.outcome import Evaluation, Export, Tracking
from components.shared.recipe.phases import PREVIOUS, Phase
from components.shared.recipe.pods import Resources, Toleration
from components.shared.recipe.recipe import Recipe
from components.shared.recipe.schedule import Curriculum, EarlyStopping, Group, LRFind, Router, Trainable
from components.shared.recipe.training import Training

__all__ = [
    "COLUMNS",
    "CPO",
    "DPO",
    "GRPO",
    "KTO",
    "MAX_CHUNKS",
    "ORPO",
    "PREVIOUS",
    "RLOO",
    "Adapter",
    "Chunks",
    "Curriculum",
    "Data",
    "EarlyStopping",
    "Evaluation",
    "Export",
    "FromScratch",
    "Generation",
    "Group",
    "Hook",
    "Hooks",
    "Keep",
    "LRFind",
    "Model",
    "Name",
    "Phase",
    "Preemption",
    "Quantity",
    "Quantization",
    "Recipe",
    "Resources",
    "Reward",
    "RewardFunction",
    "Router",
    "Section",
    "Store",
    "Tokenizer",
    "Toleration",
    "Tracking",
    "TrainTokenizer",
    "Trainable",
    "Training",
]
