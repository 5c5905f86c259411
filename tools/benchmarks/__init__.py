"""What the figures in docs/measurements/ were measured with."""
