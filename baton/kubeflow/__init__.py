"""Runs on Kubeflow Pipelines: submitted, followed, explained and healed.

kfp's client names one class of `kubernetes` in an annotation, which loads 700 modules: 50 MB and half a second of each
command. It asks nothing of them where the endpoint is given, as it is here, so stand-ins take their place meanwhile.
"""

import sys
from types import ModuleType

_STAND_INS = {name: ModuleType(name) for name in ("kubernetes", "kubernetes.client", "kubernetes.client.configuration")}

if not sys.modules.keys() & {"kfp", *_STAND_INS}:
    vars(_STAND_INS["kubernetes.client"])["configuration"] = _STAND_INS["kubernetes.client.configuration"]
    vars(_STAND_INS["kubernetes.client.configuration"])["Configuration"] = object
    sys.modules.update(_STAND_INS)
    try:
        import kfp  # noqa: F401
    finally:
        for _name in _STAND_INS:
            del sys.modules[_name]
