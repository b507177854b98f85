"""The pipeline that trains many configurations of a recipe in rungs of chunks, and exports the best.

For each bracket: begin → (data split → tokenize for each different data) → enter → for each rung: the trials that are
left, at most so many at once, train its chunks → judge. Then the winner as in `baton.pipelines.finetune`. With
`sweep.device: shared` a rung has as many pods as trials at once, each with its share of the trials.
"""

from collections.abc import Mapping

from kfp import dsl
from kfp.dsl.base_component import BaseComponent

from baton.components.report.component import report
from baton.components.sweep.component import begin, enter, judge, train_turns
from baton.components.tokenize.component import tokenize
from baton.kfp import pod
from baton.pipelines import finetune
from baton.pipelines.finetune import Value
from baton.recipe import load
from baton.recipe.recipe import Recipe
from baton.runs import ref
from baton.sweep.search import Bracket, PlannedRung, brackets, check_trials

PARALLEL = 4  # trials at once by default


def sweep(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline that compares the configurations of a recipe, which needs a sweep of valid trials."""
    check_trials(recipe)
    planned = brackets(recipe)

    @dsl.pipeline(
        name=f"{recipe.name}-sweep",
        description=f"Compares {sum(x.trials for x in planned)} configurations of {recipe.name} in rungs of chunks.",
        pipeline_config=pod.run_config(recipe.resources),
    )
    def pipeline(
        sweep_name: str = "",
        store: str = ref.encode_text(recipe.store.uri),
        base_model: str = ref.encode_text(recipe.model.base or ""),
        seed: int = recipe.seed,
        batch_size: int = recipe.training.batch_size,
        overrides: dict[str, object] = {},  # noqa: B006 - kfp reads it
    ) -> str:
        """Compares configurations while they train, and exports the best.

        Args:
            sweep_name: Name of the sweep; the same name resumes where it stopped. Empty: a new sweep.
            store: Folder, s3://, gs:// or az:// bucket, for runs and data.
            base_model: Model that trials start from: hub id, folder or URI. Empty: one from scratch.
            seed: Decides the trials' values, the split, initial weights, the order of rows and every random draw.
            batch_size: Rows per optimizer step.
            overrides: Other settings that trials share by their paths, such as {"training.weight_decay": 0.1}.
        """
        last = None
        given = {"base_model": base_model, "seed": seed, "batch_size": batch_size, "overrides": overrides}
        for bracket in planned:
            last = _bracket(recipe, bracket, sweep_name, store, given, last)
        assert last  # there is a bracket
        return handed_out(recipe, last.outputs["winner"])

    return pipeline


def winners(recipe: Recipe) -> BaseComponent:
    """Returns the pipeline of the stages after a run's last chunk."""

    @dsl.pipeline(name=f"{recipe.name}-winner", description=f"Judges and exports the best trial of {recipe.name}.")
    def pipeline(run_uri: str) -> str:
        return handed_out(recipe, run_uri)

    return pipeline


def handed_out(recipe: Recipe, run_uri: Value) -> Value:
    """Adds the stages after the last chunk of the best trial, and returns the address of its model."""
    placed = finetune.placing(recipe, "winner: ")
    trained = finetune.judged(recipe, run_uri, placed)
    placed(report(baton=trained.baton), "report")
    return trained.model


def _bracket(
    recipe: Recipe,
    bracket: Bracket,
    sweep_name: Value,
    store: Value,
    given: Mapping[str, finetune.Given],
    before: dsl.PipelineTask | None,
) -> dsl.PipelineTask:
    """Adds the stages of a bracket, after the last one of the bracket before, and returns its last one."""
    prefix = f"bracket {bracket.number}: " if bracket.number > 1 else ""
    placed = finetune.placing(recipe, prefix)
    begun = begin(
        recipe=ref.pack_text(load.dumps(recipe)),
        sweep_name=sweep_name,
        new_name=recipe.name,
        job_id=dsl.PIPELINE_JOB_ID_PLACEHOLDER,
        store=store,
        bracket=bracket.number,
        **given,
    )
    if before:
        begun.after(before)
    sweep_uri = placed(begun, "begin").outputs["sweep_uri"]
    tokens = _prepared(recipe, begun.outputs["Output"], store, placed)
    shared = {"devices": devices(recipe)} if devices(recipe) else {}
    entered = enter(sweep_uri=sweep_uri, bracket=bracket.number, **shared).after(tokens)
    verdict = placed(entered, "enter")
    for rung in bracket.rungs:
        left = verdict.outputs["Output"]
        if shared:
            trained = _shared_rung(recipe, rung, left, placed)
        else:
            trained = _rung(recipe, rung, left, placed)
        deals = shared if rung != bracket.rungs[-1] else {}
        verdict = judge(sweep_uri=sweep_uri, rung=rung.number, **deals).after(trained)
        placed(verdict, f"judge rung {rung.number}")
    return verdict


def _prepared(recipe: Recipe, preparations: Value, store: Value, placed: finetune.Placed) -> dsl.PipelineTask:
    """Adds the stages that make the trials' data, once each, and returns the last of them."""
    with dsl.ParallelFor(preparations, name="data", parallelism=_parallel(recipe)) as data:
        split = finetune.split_task(recipe, store, run_name=data.run, document=data.recipe, source=data.source)
        tokens = tokenize(baton=placed(split, "data split").outputs["Output"])
        return placed(tokens, "tokenize")


def _rung(recipe: Recipe, rung: PlannedRung, survivors: Value, placed: finetune.Placed) -> dsl.PipelineTask:
    """Adds the chunks of a rung for each trial that is left, one after the other, and returns the last stage."""
    slots = [(index, f"train chunk {index}") for index in range(rung.first, rung.chunk + 1)]
    slots += [(rung.chunk, f"spare chunk {rung.chunk}")] * recipe.chunks.spare
    with dsl.ParallelFor(survivors, name=f"rung {rung.number}", parallelism=_parallel(recipe)) as trial:
        baton, verified, _ = finetune.line(recipe, trial, slots, placed)
        return finetune.one_checkpoint(baton, rung.chunk, verified, placed)


def _shared_rung(recipe: Recipe, rung: PlannedRung, shares: Value, placed: finetune.Placed) -> dsl.PipelineTask:
    """Adds a pod of a rung for each share of its trials, and spare ones behind it; returns the last stage."""
    chunks = f"chunk {rung.chunk}" if rung.first == rung.chunk else f"chunks {rung.first}–{rung.chunk}"
    spares = recipe.chunks.spare
    with dsl.ParallelFor(shares, name=f"rung {rung.number}", parallelism=_parallel(recipe)) as share:
        trials = share.trials
        for spare in range(spares, -1, -1):
            task = train_turns(sweep_uri=share.sweep_uri, rung=rung.number, trials=trials, spare=spare)
            placed(task, f"{'train' if spare == spares else 'spare'} {chunks}", compute=True)
            pod.on_chunk(task, recipe)
            trials = task.outputs["Output"]
        return task


def devices(recipe: Recipe) -> int:
    """Returns how many pods share the trials of a rung at most, 0 where each chunk of a trial has a pod."""
    assert recipe.sweep
    return _parallel(recipe) if recipe.sweep.device == "shared" else 0


def _parallel(recipe: Recipe) -> int:
    assert recipe.sweep
    return recipe.sweep.parallel or PARALLEL
