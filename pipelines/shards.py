"""Tokenizing in several pods: each makes its segments, and a last one joins what all have made."""

from kfp import dsl

from baton.components.shared.recipe import Recipe
from baton.components.tokenize.component import tokenize, tokenize_shard
from baton.pipelines import resources
from baton.pipelines.chunks import Graph, Value, placing


def shards(recipe: Recipe) -> list[Graph]:
    """Returns the graph that tokenizing lies in, none where one pod does it.

    A graph of its own, as the loop in the root would make the last pod wait for the data split too: the baton would not
    go along one line.
    """
    of = recipe.data.shards
    if of == 1:
        return []
    spec = recipe.model.tokenizer
    placed = placing(recipe)

    @dsl.pipeline(name="tokenize-shards")
    def tokenize_shards(baton: str) -> str:
        trained = None
        if spec and spec.train:  # from all rows: one process, and the shards take what it has made
            trained = placed(tokenize_shard(baton=baton, index=0, of=of), "train tokenizer")
            resources.with_cache(trained)
        with dsl.ParallelFor(list(range(1, of + 1)), name="shards") as index:
            shard = placed(tokenize_shard(baton=baton, index=index, of=of), "tokenize shard")
            resources.with_cache(shard)
            if trained:
                shard.after(trained)
        joined = placed(tokenize(baton=baton).after(shard), "tokenize")
        resources.with_cache(joined)
        output: Value = joined.outputs["Output"]
        return output

    return [Graph(f"tokenize in {of} shards", tokenize_shards)]
