#!/bin/sh
# Trains a model on Kubeflow and leaves what came of it in comment.md; for anything that has a shell.
#
#   BATON_KFP_ENDPOINT   needed: where the API of Kubeflow Pipelines is reached
#   BATON_KFP_TOKEN      a bearer token, where that asks for one
#   BATON_NAMESPACE      your profile, on a Kubeflow with several
#   BATON_IMAGE          image of the pods, instead of the recipe's
#   BATON_RECIPE         path of the recipe; recipe.yaml
#   BATON_PIPELINE       retrain, which trains only if data or recipe have changed, or finetune; retrain
#   AWS_…                the store's credentials: without them comment.md has neither figures nor links
#
# The exit code is 0 where the model was promoted, has been trained, or there was nothing to do, 3 where its gate
# rejected it, and else that of what failed.
set -eu

recipe=${BATON_RECIPE:-recipe.yaml} pipeline=${BATON_PIPELINE:-retrain}
: "${BATON_KFP_ENDPOINT:?is not set; the top of this script explains it}"

baton validate "$recipe"
baton compile "$recipe" --pipeline "$pipeline" --output pipeline.yaml
baton submit "$recipe" --pipeline "$pipeline" ${BATON_NAMESPACE:+--namespace "$BATON_NAMESPACE"} \
  --wait --retries 3 --json > result.json || true # what came of it decides
baton ci-report "$recipe" --result result.json > comment.md || code=$?
cat comment.md
exit "${code:-0}"
