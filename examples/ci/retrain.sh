#!/bin/sh
# Retrains the model of a recipe on Kubeflow Pipelines and leaves what came of it in comment.md.
#
#   RECIPE=recipe.yaml BATON_KFP_ENDPOINT=https://kubeflow.example/pipeline ./retrain.sh
#
# The store's credentials are the usual AWS_… variables, a bearer token is BATON_KFP_TOKEN. The exit code is 0 where
# the model was promoted or there was nothing to do, 3 where its gate rejected it.
set -eu

baton validate "$RECIPE"
baton compile "$RECIPE" --pipeline retrain --output retrain.yaml
baton submit "$RECIPE" --pipeline retrain --output json > submitted.json
run_id=$(python3 -c 'import json; print(json.load(open("submitted.json"))["run_id"])')
baton status "$run_id" --wait || true # what it came to decides
baton outcome "$RECIPE" --id "$run_id" > comment.md || code=$?
cat comment.md
exit "${code:-0}"
