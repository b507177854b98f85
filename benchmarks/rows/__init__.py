"""What is measured: one module a row, each with `NAME`, `TITLE` and `measure`."""

from types import ModuleType

from benchmarks.rows import (
    boundary,
    bytes,
    chunks,
    frontier,
    frontier_knobs,
    goodput,
    guard,
    imports,
    memory,
    parallel,
    pod,
    publish,
    restart,
    restore,
    save_stall,
    scale,
    slice,
    split,
    sweep,
    tokenize,
    virtual,
)

ALL: dict[str, ModuleType] = {
    module.NAME: module
    for module in (
        save_stall,
        frontier,
        frontier_knobs,
        bytes,
        restore,
        publish,
        imports,
        pod,
        boundary,
        chunks,
        restart,
        goodput,
        memory,
        split,
        tokenize,
        slice,
        parallel,
        virtual,
        guard,
        sweep,
        scale,
    )
}
"""The rows by name, in the order in which they are measured."""
