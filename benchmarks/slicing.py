"""A chunk's tokens, from their manifest to the first batch: `python -m benchmarks.slicing RUN_URI STEPS`.

What a chunk of so many steps needs is fetched in a fresh process; its imports are not counted.
"""

import sys
import tempfile
import time

from baton.runs.run import Run
from baton.train import samplers
from baton.train.tokens import ChunkTokens
from benchmarks.mark import mark


def main(run_uri: str, num_steps: int) -> None:
    run = Run.open(run_uri)
    recipe, plan = run.recipe(), run.plan()
    with tempfile.TemporaryDirectory(prefix="baton-bench-") as scratch:
        began = time.perf_counter()
        tokens = ChunkTokens(run, recipe, plan, lambda _: scratch)
        tokens.fetch(0, num_steps)
        rows = samplers.train_dataset(tokens)
        if isinstance(rows, samplers.Sliced):
            sampler = samplers.sampler(recipe, rows, plan.num_steps)
            assert sampler
            drawn = iter(sampler)
            batch = rows.__getitems__([next(drawn) for _ in range(recipe.training.batch_size)])
        else:
            batch = rows.__getitems__(list(range(recipe.training.batch_size)))
        seconds = time.perf_counter() - began
    assert (len(batch), len(rows)) == (recipe.training.batch_size, plan.rows)
    mark("opened", seconds=seconds)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
