"""Predicts how large a compiled pipeline's workflow grows, and whether it then still fits Kubernetes and Kubeflow.

Argo keeps a workflow, its specification and the state of all its nodes, as one object of at most 1 MiB. Beyond that it
compresses the nodes, which Kubeflow's API cannot read; where even that does not fit, the run fails.
"""

from __future__ import annotations

import base64
import gzip
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from baton.pipelines.compiling.workflow.documents import Compiled, dumps
from baton.pipelines.compiling.workflow.nodes import Node, nodes
from baton.pipelines.compiling.workflow.pod import Assumed
from baton.pipelines.compiling.workflow.spec import arguments, spec_size

MAX_WORKFLOW_BYTES = 1_048_576
"""What Argo accepts for one workflow."""
GZIP_LEVEL = 5
"""The level of zlib whose results are as long as those of Argo's gzip."""
REST_BYTES = 1_000
"""Metadata and the rest of the status, measured."""
MARGIN = 1.05
"""Predictions of nodes are up to so much too small."""


@dataclass(frozen=True)
class WorkflowSize:
    """Bytes of a workflow whose stages have all ended."""

    spec: int
    nodes: int
    compressed: int
    pods: int
    """Number of stages."""
    stages: Mapping[str, int]
    """Bytes of the nodes of each task, by its path; of loops, those of all iterations together."""
    limit: int = MAX_WORKFLOW_BYTES
    """What the cluster takes for one workflow, compressed."""

    @property
    def readable(self) -> bool:
        """Whether Kubeflow's API shows the stages to the end."""
        return self._share(self.nodes, MAX_WORKFLOW_BYTES) >= 1

    @property
    def ends(self) -> bool:
        """Whether the run can end at all."""
        return self.readable or self._share(self.compressed, self.limit) >= 1

    @property
    def readable_stages(self) -> int:
        """About how many stages end before Kubeflow's API stops to show them."""
        return max(0, min(self.pods, int(self.pods * self._share(self.nodes, MAX_WORKFLOW_BYTES))))

    @property
    def possible_stages(self) -> int:
        """About how many stages end before the workflow is too large and the run fails."""
        return max(0, min(self.pods, int(self.pods * self._share(self.compressed, self.limit))))

    def _share(self, status: int, limit: int) -> float:
        return (limit - self.spec - REST_BYTES) / (status * MARGIN)


def predict(documents: Sequence[object], assumed: Assumed | None = None) -> WorkflowSize:
    """Predicts the size of the workflow of a compiled file.

    Args:
        documents: The file's documents, which conform.
        assumed: What is known at run time alone.
    """
    compiled = Compiled.read(documents)
    made = nodes(compiled, arguments(compiled), assumed or Assumed())
    stages: Counter[str] = Counter()
    for node in made:
        stages[node.stage] += node.size
    pods = sum(node.is_stage for node in made)
    return WorkflowSize(spec_size(compiled), sum(stages.values()) + 1, _compressed(made), pods, dict(stages))


def _compressed(made: Sequence[Node]) -> int:
    by_id = {node.identifier: node.content for node in made}
    text = dumps(dict(sorted(by_id.items())), ordered=False)
    return len(base64.b64encode(gzip.compress(text.encode(), GZIP_LEVEL)))
