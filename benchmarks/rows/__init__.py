"""What is measured: one module a row, each with `NAME`, `TITLE` and `measure`."""

from types import ModuleType

from benchmarks.rows import (
    boundary,
    bytes,
    chunks,
    frontier,
    goodput,
    guard,
    imports,
    memory,
    notice,
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
        bytes,
        restore,
        publish,
        imports,
        boundary,
        chunks,
        restart,
        goodput,
        notice,
        memory,
        split,
        tokenize,
        slice,
        virtual,
        guard,
        sweep,
        scale,
    )
}
"""The rows by name, in the order in which they are measured."""
