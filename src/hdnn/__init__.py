from hdnn import activations, engine, functional, schemes, sparsity
from hdnn.errors import HDNNError
from hdnn.networks import *
from hdnn.sparsity import Sparsity
