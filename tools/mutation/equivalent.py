# ruff: noqa: E501 - names are as long as they are
"""Mutants that no test can kill, by name, and why: what they change cannot be seen."""

EQUIVALENT: dict[str, str] = {
    "baton/checkpoint/sharded.py:read_metadata operand: argument or 0 -> (argument) #0": (
        "the opcodes of `_MEMO` always have an argument; `or 0` is for types"
    ),
    "baton/store/bundle.py:BundleWriter._copied removed: continue -> pass #1": (
        "nothing of the loop comes after it; the other branch returns"
    ),
    "baton/train/samplers.py:distribute_rows constant: False -> True #0": (
        "every step has as many pieces for each rank, so there is nothing to fill up"
    ),
    'baton/train/samplers.py:follow_epochs condition: hasattr(inner, "set_epoch") -> False #0': (
        "`DistributedBatches` passes the epoch on to its sampler, which is what the other branch sets it on"
    ),
    "baton/train/samplers.py:share comparison: >= -> > #0": (
        "at exactly 1 each ramp gives 1.0: start + (1 - start), start ** 0 and a whole number of levels are exact"
    ),
    "baton/train/reshard.py:_Partitions.__init__ constant: \"\" -> '-' #0": (
        'a state that is compared with another number of ranks\' was restored, so there is a folder; `or ""` is for types'
    ),
    "baton/train/sharding.py:Fsdp.read_optimizer keyword: , weights_only=True ->  #1": (
        "PyTorch's own default since 2.6; it is written out so that nobody has to know"
    ),
    "baton/train/sharding.py:Fsdp.read_optimizer constant: True -> False #1": (
        "mapped or read: the same values, in less memory"
    ),
    "baton/train/trainer.py:ExactResume._load_from_checkpoint operand: weight.requires_grad and weight.dtype != types[name] -> (weight.dtype != types[name]) #0": (
        "what is frozen is not loaded from an adapter's checkpoint, so its type has not changed"
    ),
    "baton/train/user_state.py:OwnStates.restore condition: not self._saved -> False #0": (
        "with nothing saved two walks find nothing to put back; the line spares them"
    ),
    "baton/train/user_state.py:Walk._follow condition: not isinstance(each, CONSTANT) -> True #0": (
        "a constant has no places and nothing in it, so following it ends at once; the line spares the call"
    ),
}
