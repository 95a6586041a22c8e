"""From a model's config.json to the backends and caches of its layers, with every reason."""

from .compressed_layers import compressions, dsa_model_shape
from .errors import ModelConfigError
from .layers import ExplainedLayer, explain_models
from .model_config import ModelConfig

__all__ = [
    "ExplainedLayer",
    "ModelConfig",
    "ModelConfigError",
    "compressions",
    "dsa_model_shape",
    "explain_models",
]
