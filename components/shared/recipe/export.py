"""What is handed out at the end."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from baton.components.shared.recipe.base import Name, Positive, Section

ExportFormat = Literal["safetensors", "adapter", "gguf", "onnx", "mlflow", "oci", "kserve"]
QuantizationType = Literal["f32", "f16", "bf16", "q8_0", "q5_1", "q5_0", "q4_1", "q4_0"]


class GGUF(Section):
    """A file for llama.cpp and what is built on it."""

    types: Annotated[list[QuantizationType], Field(min_length=1)] = ["q8_0"]
    """Types of the weights; a file for each."""


class ONNX(Section):
    """A graph for ONNX Runtime: token ids and mask in, logits out, computed in float32."""

    opset: Annotated[int, Field(ge=18)] = 20
    """Version of the operators."""


class Hub(Section):
    """A repository on the Hugging Face Hub, with the token in `HF_TOKEN`."""

    repo: Annotated[str, Field(pattern=r"^[\w.-]+/[\w.-]+$")]
    """`organisation/name`; made when it is not there."""
    private: bool = True
    """Whether a new repository is private."""
    revision: str = "main"
    """Branch to push to."""


class KServe(Section):
    """The `InferenceService` that serves the model."""

    name: Name | None = None
    """Its name; the recipe's when left out."""
    namespace: Name | None = None
    """Its namespace; that of the user who applies it when left out."""
    service_account: Name | None = None
    """Account whose secret holds the store's credentials."""
    model_uri: str | None = None
    """Address to serve from, such as `oci://registry/model:tag` or `pvc://claim/path`; the export's own when left
    out."""
    gpus: Annotated[int, Field(ge=0)] | None = None
    """GPUs of the server; `resources.gpus` when left out."""


class Export(Section):
    """What is handed out at the end, each format loaded back and compared before it counts."""

    formats: Annotated[list[ExportFormat], Field(min_length=1)] = ["safetensors"]
    """`safetensors`, the whole model, an adapter folded in; `adapter` alone; `gguf`; `onnx`; an `mlflow` model; an
    `oci` image layout; a `kserve` manifest."""
    checkpoint: Literal["last", "best"] = "last"
    """Which state of the run is evaluated and handed out: that of the last step, or the one with the lowest evaluation
    loss, which is then saved when it is measured."""
    dtype: Literal["float32", "bfloat16", "float16"] | None = None
    """Number type of the whole model's weights; as trained when left out."""
    shard_size: Annotated[str, Field(pattern=r"^[1-9][0-9]*(MB|GB)$")] = "5GB"
    """Largest file of weights."""
    gguf: GGUF = GGUF()
    """Of the format `gguf`."""
    onnx: ONNX = ONNX()
    """Of the format `onnx`."""
    registered_model: Annotated[str, Field(pattern=r"^[^:/]+$")] | None = None
    """Name in MLflow's registry; each run that is not rejected becomes a version of it."""
    alias: Annotated[str, Field(pattern=r"^[A-Za-z][\w-]*$")] | None = None
    """Alias that the new version takes over, such as `production`: only with a gate, and only when it held."""
    hub: Hub | None = None
    """Also push the model to the Hugging Face Hub."""
    kserve: KServe = KServe()
    """Of the format `kserve`."""
    artifact: bool = False
    """Also copy the main model's files into Kubeflow's artifact `model`, for components that take an `Input[Model]` and
    load it from there; without it the artifact is the model card, with the address in its metadata."""
    licence: str | None = None
    """Licence of the model, as the Hub spells it (`apache-2.0`); the base model's when left out and known."""
    check_tokens: Positive = 16
    """Tokens that each format must write just as the trained model does, greedily, before it counts; where a format
    rounds the weights, as the model does with them rounded."""

    @model_validator(mode="after")
    def _consistent(self) -> Export:
        if len(set(self.formats)) < len(self.formats):
            raise ValueError(f"formats: {', '.join(self.formats)} names one twice")
        if "safetensors" not in self.formats and "adapter" not in self.formats:
            raise ValueError("formats: takes safetensors or adapter at least; the others are made from them")
        if self.alias and not self.registered_model:
            raise ValueError("alias: an alias belongs to a registered model; set export.registered_model")
        if self.registered_model and "mlflow" not in self.formats:
            raise ValueError("registered_model: an MLflow model is registered; add mlflow to export.formats")
        return self
