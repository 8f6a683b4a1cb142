"""Which node may talk to which: block patterns R of K and T of J, and the locality condition."""

from hdnn.sparsity.patterns import (
    BlkSprs,
    Breach,
    Explanation,
    Sparsity,
    binary,
    components,
    dependency,
    design,
    design_R,
    design_T,
    explain,
    free_weights,
    from_networkx,
    is_local,
    product,
)

__all__ = [
    "BlkSprs",
    "Breach",
    "Explanation",
    "Sparsity",
    "binary",
    "components",
    "dependency",
    "design",
    "design_R",
    "design_T",
    "explain",
    "free_weights",
    "from_networkx",
    "is_local",
    "product",
]
