"""What a recorded training step would take on more ranks: communication after the alpha-beta model."""
