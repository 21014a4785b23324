"""What comparing the modes and the experiments share."""
