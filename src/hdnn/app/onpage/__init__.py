"""What the report says of a run: its scores, its predictions, its training and its gradients."""
