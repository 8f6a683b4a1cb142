"""The paper's tables and figures, one file each: `python -m hdnn.experiments.table_planar`."""
