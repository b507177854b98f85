"""A cached step is skipped although its output was deleted, and later steps fail.

Issue: https://github.com/kubeflow/pipelines/issues/7939
Upstream: reproduced by the cache of kfp 2.17's local engine, which trusts buckets as the backend does: an entry with a
    deleted artifact is a hit. For local files it looks, since a fix.
Baton: asks the store, not the engine. With the first of two chunks called done and its checkpoint deleted, the second
    trains from the newest checkpoint to its target, to the same bits. `tests/end_to_end/test_cache.py` runs it with the
    engine.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from kfp import dsl
from kfp.local.cache import LocalCache

from baton.recipe.recipe import Recipe
from baton.runs.run import Run


def test_upstream_believes_in_what_is_gone(tmp_path: Path) -> None:
    cache = LocalCache(str(tmp_path / "cache"))
    key = cache.compute_key("train", "image", ["train"], {"steps": 8})
    for name, uri in (("bucket", "s3://nowhere/model"), ("file", str(tmp_path / "model"))):
        (tmp_path / "model").touch()
        cache.put(key, {"model": dsl.Model(uri=uri)})
        (tmp_path / "model").unlink()
        hit = cache.get(key)
        assert (hit is not None) == (name == "bucket")
        assert hit is None or hit["model"].uri == uri


def test_baton_trains_to_its_target_without_the_one_before(recipes: dict[str, Recipe], adapted: Run, legs: Any) -> None:
    run = legs.prepare(legs.changed(recipes["lora"], chunks__count=2), "cached")
    code, printed = legs.leg(legs.chunk, run.uri, 1)
    assert code == 0, printed
    shutil.rmtree(Path(run.storage.key(run.path("checkpoints"))))
    code, printed = legs.leg(legs.chunk, run.uri, 2)
    assert code == 0, printed
    assert legs.final(run).meta.state == legs.final(adapted).meta.state
    assert legs.losses(run) == legs.losses(adapted)
