"""How far a sweep's plan carries: `python -m benchmarks.scaling` prints the tables of docs/internals/scale.md.

Three parts, each alone with --only: `simulation` of 1,000 trials on 64 GPUs, `size` of what is compiled, and `requests`
that a chunk makes of its store, counted by a server that this starts.
"""

from __future__ import annotations

import argparse
import collections
import os
import re
import subprocess
import sys
import tempfile
import time
from typing import Any

from baton.recipe import load
from baton.recipe.recipe import Recipe
from benchmarks import simulating
from benchmarks.server import Moto

REQUEST = re.compile(r'"(GET|HEAD|PUT|POST|DELETE) /(\S*) HTTP')
LISTING = re.compile(r"list-type=2|^[^/?]+/?(\?|$)")
PARALLEL = 64
WRITES, READS = 3500, 5500
"""Requests a second that Amazon S3 promises for one partition of a bucket's keys; it splits partitions under load."""
PREPARE = """
import sys
from baton.data.split import split_data
from baton.recipe import load as recipe_file
from baton.data.tokenize import tokenize_run
print(tokenize_run(split_data(recipe_file.loads(sys.argv[1]), "counted")["run_uri"]))
"""
CHECKPOINT = (
    "from baton.checkpoint.proof import promote; from baton.runs.run import Run; import sys; "
    "promote(Run.open(sys.argv[1]), int(sys.argv[2]))"
)


def main() -> None:
    """Prints what is asked for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parts = {"simulation": simulating.print_table, "size": print_sizes, "requests": print_requests}
    parser.add_argument("--only", action="append", choices=list(parts))
    given = parser.parse_args()
    for name, show in parts.items():
        if given.only is None or name in given.only:
            print(f"\n### {name}\n", flush=True)
            show()


def swept(trials: int, chunks: int, eta: int | None) -> Recipe:
    """Returns a recipe whose sweep has so many trials."""
    search: dict[str, Any] = {
        "trials": trials,
        "parallel": PARALLEL,
        "parameters": {
            "training.learning_rate": {"min": 1e-5, "max": 1e-2, "log": True},
            "training.weight_decay": {"min": 0.0, "max": 0.1},
            "adapter.r": [4, 8, 16],
        },
    }
    document = {
        "name": "scale",
        "store": "s3://bucket/baton",
        "model": {"base": "org/model"},
        "data": {"source": "s3://bucket/rows.jsonl"},
        "adapter": {"type": "lora"},
        "training": {"max_steps": 20 * 1000},
        "evaluation": {"every": 1000},
        "chunks": {"count": chunks},
        "resources": {"gpus": 1, "image": "registry/baton-gpu:1", "secret": "store"},
        "tracking": {"mlflow": None},
        "sweep": search | ({"halving": {"eta": eta}} if eta else {}),
    }
    return load.validate(document, origin="scale")


def print_sizes() -> None:
    """Compiles sweeps and prints how large the files are."""
    from baton.compiler.pipeline_file import Pipeline, write_package

    print("| trials | chunks | rungs | compiled, kB | seconds |\n|---|---|---|---|---|")
    for trials, chunks, eta in ((8, 4, 2), (64, 20, 2), (1000, 20, 2), (1000, 50, 2)):
        with tempfile.TemporaryDirectory() as folder:
            recipe, path = swept(trials, chunks, eta), f"{folder}/sweep.yaml"
            began = time.monotonic()
            write_package(recipe, path, Pipeline.sweep)
            seconds, size = time.monotonic() - began, os.path.getsize(path)
            with open(path, encoding="utf-8") as file:
                rungs = len(set(re.findall(r"name: judge rung (\d+)", file.read())))
        print(f"| {trials:,} | {chunks} | {rungs} | {size / 1000:.0f} | {seconds:.1f} |", flush=True)


def requests_since(log: str, mark: int) -> collections.Counter[str]:
    """Returns the requests in a log after a place, by kind."""
    with open(log, encoding="utf-8") as file:
        file.seek(mark)
        found = [match for line in file if (match := REQUEST.search(line))]
    return collections.Counter("LIST" if m[1] == "GET" and LISTING.search(m[2]) else m[1] for m in found)


def print_requests() -> None:
    """Runs a small run of three chunks against a server that counts, and prints what each stage asks of it."""
    with tempfile.TemporaryDirectory() as folder:
        server = Moto()
        try:
            counts = _counted(server, folder)
        finally:
            server.close()
    kinds = ("GET", "HEAD", "LIST", "PUT", "POST", "DELETE")
    print(f"| stage | {' | '.join(kinds)} | in all |\n|{'---|' * (len(kinds) + 2)}")
    for stage, count in counts.items():
        print(f"| {stage} | {' | '.join(str(count[kind]) for kind in kinds)} | {sum(count.values())} |")
    both = counts["train-chunk 2"] + counts["checkpoint 2"]
    writes = both["PUT"] + both["POST"] + both["DELETE"] + both["LIST"]  # a listing is billed and bounded as a write
    reads = both["GET"] + both["HEAD"]
    rate = min(WRITES / writes, READS / reads)
    print(
        f"\nA chunk and its checkpoint stage: {writes} writes and listings, {reads} reads; at {WRITES:,} and {READS:,} "
        f"a second one partition of a bucket serves {rate:.0f} chunks a second."
    )


def _counted(server: Moto, folder: str) -> dict[str, collections.Counter[str]]:
    keys = {"AWS_ACCESS_KEY_ID": "bench", "AWS_SECRET_ACCESS_KEY": "bench", "AWS_DEFAULT_REGION": "us-east-1"}
    environment = {**os.environ, **keys, "AWS_ENDPOINT_URL": server.endpoint, "HF_HUB_OFFLINE": "1"}
    os.environ.update(keys, AWS_ENDPOINT_URL=server.endpoint)
    import s3fs

    s3fs.S3FileSystem().mkdir("counted")
    recipe = load.load(
        os.path.join(os.path.dirname(__file__), "..", "tests", "recipes", "scratch.yaml"),
        ["store=s3://counted", "chunks.count=3"],
    )
    uri = "s3://counted/runs/counted"
    stages = {"data split, tokenize": ["-c", PREPARE, load.dumps(recipe)]}
    for index in (1, 2):
        stages[f"train-chunk {index}"] = ["-m", "baton.kfp.process", "train_chunk", uri, str(index)]
        stages[f"checkpoint {index}"] = ["-c", CHECKPOINT, uri, str(index)]
    counts = {}
    for stage, command in stages.items():
        mark = os.path.getsize(server.log)
        log = f"{folder}/stage.log"
        with open(log, "w", encoding="utf-8") as file:
            code = subprocess.run([sys.executable, *command], env=environment, stdout=file, stderr=file, check=False)
        if code.returncode:
            with open(log, encoding="utf-8") as file:
                raise SystemExit(f"{stage} failed:\n{file.read()[-3000:]}")
        time.sleep(0.5)
        counts[stage] = requests_since(server.log, mark)
    return counts


if __name__ == "__main__":
    main()
