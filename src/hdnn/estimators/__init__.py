"""For scikit-learn: a classifier and a regressor that need nothing but numbers in a table."""

# The base first: it says which extra is missing where scikit-learn is.
from hdnn.estimators.base import CERTIFICATE_NUMBERS as CERTIFICATE_NUMBERS
from hdnn.estimators.base import CERTIFIED as CERTIFIED
from hdnn.estimators.base import CHUNK as CHUNK
from hdnn.estimators.base import NETWORKS as NETWORKS
from hdnn.estimators.classifier import HDNNClassifier
from hdnn.estimators.regressor import HDNNRegressor

__all__ = ["HDNNClassifier", "HDNNRegressor"]
