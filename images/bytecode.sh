#!/bin/sh
# Compiles what stages import, as a read-only root keeps no bytecode that a first import would write. Unchecked: in an
# image no source changes, and a builder that sets the files' times (SOURCE_DATE_EPOCH) would make it all stale.
#   bytecode.sh ENVIRONMENT
set -eu

# No stage imports these, or, of the models, one file each: together a tenth of the image.
unused='/(databricks|fontTools|networkx|nltk|sklearn|transformers/models/(?!auto/)[^/]*'
unused="$unused|torch/(_inductor/(codegen|fx_passes|kernel)|testing/_internal))/"

# Some packages carry templates named *.py, which do not compile.
"$1/bin/python" -m compileall -q -j 0 --invalidation-mode unchecked-hash -x "$unused" "$1/lib" >/dev/null || true
