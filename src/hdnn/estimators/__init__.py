"""For scikit-learn: a classifier and a regressor that need nothing but numbers in a table."""

# The base first: it says which extra is missing where scikit-learn is.
from hdnn.estimators.base import CERTIFICATE_NUMBERS, CERTIFIED, CHUNK, NETWORKS
from hdnn.estimators.classifier import HDNNClassifier
from hdnn.estimators.regressor import HDNNRegressor

__all__ = [
    "CERTIFICATE_NUMBERS",
    "CERTIFIED",
    "CHUNK",
    "NETWORKS",
    "HDNNClassifier",
    "HDNNRegressor",
]
