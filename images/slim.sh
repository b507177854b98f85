#!/bin/sh
# Removes from an installed environment what no stage reads: the libraries' own tests, headers and symbol tables.
#   slim.sh SITE_PACKAGES
# The list is by name: a pattern over everything would one day take a module called "test" that something imports.
set -eu
cd "$1"

for package in dill huey matplotlib mpl_toolkits mpmath multiprocess networkx numpy pandas pyarrow regex scipy sklearn sympy \
    websocket; do
    find "$package" -type d -name tests -prune -exec rm -rf {} +
done
rm -rf joblib/test nltk/test torch/test torch/include torch/share pyarrow/include
rm -f torch/bin/test_* torch/bin/protoc* torch/lib/libjitbackend_test.so torch/lib/libtorchbind_test.so
find fontTools lxml pyarrow scipy sklearn -type f \( -name '*.c' -o -name '*.h' -o -name '*.pxd' -o -name '*.pyx' \) -delete
find matplotlib numpy pandas scipy torch -type f -name '*.pyi' -delete

# Symbol tables are a fifth of libtorch. Libraries whose layout was patched (in *.libs) are left alone: strip breaks those.
find . -type f \( -name '*.so' -o -name '*.so.*' \) -not -path '*.libs/*' -exec strip --strip-unneeded {} +
