"""The recipe: the user's one document. YAML carries values, this schema carries the defaults.

One file per part: `model`, `data` with `quality`, `adapter`, `training` with `methods` and `schedule`, `hooks`,
`chunks`, `evaluation`, `export`, `tracking`, `pods`, `retrain`, `sweep`; `recipe` holds them together, and `rules` are
those between them.
"""

from baton.components.shared.recipe.adapter import Adapter
from baton.components.shared.recipe.base import Name, Quantity, Section
from baton.components.shared.recipe.chunks import MAX_CHUNKS, Chunks, Keep, Preemption, Signing, Store
from baton.components.shared.recipe.data import COLUMNS, Data, Source, Split
from baton.components.shared.recipe.evaluation import GATE, Evaluation, Tasks
from baton.components.shared.recipe.export import GGUF, ONNX, Export, Hub, KServe
from baton.components.shared.recipe.hooks import Hook, Hooks
from baton.components.shared.recipe.methods import (
    CPO,
    DPO,
    GRPO,
    KTO,
    ORPO,
    RLOO,
    SPECS,
    Completions,
    Generation,
    MethodSpec,
    Reward,
    RewardFunction,
)
from baton.components.shared.recipe.model import FromScratch, Model, NamedModel, Quantization, Tokenizer, TrainTokenizer
from baton.components.shared.recipe.parallel import Parallel
from baton.components.shared.recipe.phases import PREVIOUS, Phase
from baton.components.shared.recipe.pods import Resources, Toleration
from baton.components.shared.recipe.quality import Action, Quality
from baton.components.shared.recipe.recipe import Recipe
from baton.components.shared.recipe.retrain import ACCEPTED, Retrain
from baton.components.shared.recipe.schedule import Curriculum, EarlyStopping, Group, Guard, LRFind, Router, Trainable
from baton.components.shared.recipe.sweep import MAX_TRIALS, Range, Search
from baton.components.shared.recipe.tracking import Tracking
from baton.components.shared.recipe.training import Training

__all__ = [
    "ACCEPTED",
    "COLUMNS",
    "CPO",
    "DPO",
    "GATE",
    "GGUF",
    "GRPO",
    "KTO",
    "MAX_CHUNKS",
    "MAX_TRIALS",
    "ONNX",
    "ORPO",
    "PREVIOUS",
    "RLOO",
    "SPECS",
    "Action",
    "Adapter",
    "Chunks",
    "Completions",
    "Curriculum",
    "Data",
    "EarlyStopping",
    "Evaluation",
    "Export",
    "FromScratch",
    "Generation",
    "Group",
    "Guard",
    "Hook",
    "Hooks",
    "Hub",
    "KServe",
    "Keep",
    "LRFind",
    "MethodSpec",
    "Model",
    "Name",
    "NamedModel",
    "Parallel",
    "Phase",
    "Preemption",
    "Quality",
    "Quantity",
    "Quantization",
    "Range",
    "Recipe",
    "Resources",
    "Retrain",
    "Reward",
    "RewardFunction",
    "Router",
    "Search",
    "Section",
    "Signing",
    "Source",
    "Split",
    "Store",
    "Tasks",
    "Tokenizer",
    "Toleration",
    "Tracking",
    "TrainTokenizer",
    "Trainable",
    "Training",
]
