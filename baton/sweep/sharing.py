from baton.runs.run import Run, Sweep


def groups(sweep: Sweep, runs: list[Run], on_event) -> list[list[Run]]:
    return [runs]
